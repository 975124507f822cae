"""The kill loop over streams from topic to topic, whose answers are known by arithmetic. Read `run.py` first."""

"""The schema registry: its four requests, and the schemas that streams have used. Open `schemas.py` first."""

"""How streams run, read from `databricks.yml` and the files it includes. Read `job_yaml.py` first."""

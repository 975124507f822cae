"""The job YAML: `databricks.yml` and the files it includes, which say how streams run. Read `job_yaml.py` first."""

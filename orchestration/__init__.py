"""Who starts, watches and restarts sessions: Dagster definitions, the supervisor, the job YAML, and the command line.

Open `definitions.py` first. The only package that imports Dagster, typer and rich.
"""

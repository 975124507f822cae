"""Starting, watching and restarting sessions: Dagster definitions, the supervisor, the job YAML, the command line.

Open `definitions.py` first. The only package that imports Dagster, typer and rich.
"""

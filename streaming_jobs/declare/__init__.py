"""What a user declares: topics, tables, rules, slices. Read `topic.py` and `table.py` first."""

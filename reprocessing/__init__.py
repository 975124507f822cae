"""Puts streams right: plan, rebuild beside the old output, check, publish. Read `executor.py` first.

executor.py   apply, resume and abort; the journal says how far it came
undo.py       the plan that takes a published one back
explainer.py  the plan in words, read off the stages
report.py     the outcome, as a page
planning/     from a request to a plan
plans/        a plan and its journal on disk
stages/       what applying a plan does, one small class per stage; executor and explainer walk the same list
rebuild/      what the stages do it with
"""

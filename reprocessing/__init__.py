"""Puts streams right: plan, rebuild beside the old output, check, publish. Read `executor.py` first.

executor.py   apply, resume and abort; the journal has the stages that are done
undo.py       the plan that takes a published one back
explainer.py  the plan in words, read from the stages
report.py     the outcome, as a page
planning/     from a request to a plan
plans/        a plan and its journal on disk
stages/       the steps of applying a plan, one small class per stage; executor and explainer walk the same list
rebuild/      the operations on tables and state that the stages use
"""

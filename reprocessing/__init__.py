"""Recovers streams: plan, rebuild beside the published output, audit, publish. Read `executor.py` first.

executor.py        apply, resume and abort; the journal lists the finished stages
explainer.py       the plan in words, read from the stages
plan/              from a request to a frozen plan on disk, with its journal
stages/            the steps of carrying a plan out, which executor and explainer walk, and what they do
replay/            one replay beside the stream: its folders, its end, the difference that it makes
plan/written_topics.py  what a recovery does to the topics that its streams write
report/            the outcome, as a page
preview/ slices/   the same replay without publishing; one range of a table rebuilt while its stream runs
timeline/ sample.py  the history of a stream; some rows of a table
"""

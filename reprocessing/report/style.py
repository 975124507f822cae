"""The style of a report's page: colours by role, for a light and a dark background.

Corrected, new and gone rows differ in lightness as well as in hue (blue, orange and purple stay apart for people who
see no red or no green), and the legend names them in words.
"""

STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --soft: #59636e; --line: #d1d9e0; --back: #ffffff; --box: #f6f8fa;
  --before: #8c959f; --replay: #b35900; --now: #0969da; --skip: #8a3fa0;
  --corrected: #c26a00; --new: #0a5fc2; --gone: #6d2077 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --soft: #9ea7b1; --line: #3d444d; --back: #0d1117; --box: #151b23;
    --before: #8b949e; --replay: #f0a04b; --now: #58a6ff; --skip: #d2a8ff;
    --corrected: #f0a04b; --new: #4c9aff; --gone: #e2b8ff } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem;
  color: var(--ink); background: var(--back) }
h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--line); padding-bottom: .3rem }
h3 { margin: 1.8rem 0 .4rem }
h4 { margin: 1.2rem 0 .2rem; font-weight: 600 }
p { margin: .3rem 0 .6rem }
.soft { color: var(--soft) }
pre { background: var(--box); padding: 1rem; overflow-x: auto; font-size: 13px }
.wide { overflow-x: auto }
table { border-collapse: collapse; margin: .5rem 0 1.5rem }
td, th { padding: .2rem .8rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top }
td:not(:last-child) { white-space: nowrap }
td.n { text-align: right; font-variant-numeric: tabular-nums }
summary { cursor: pointer; color: var(--soft) }
svg { display: block; width: 100%; min-width: 40rem; height: auto; margin: .4rem 0 }
svg text { font: 13px system-ui, sans-serif; fill: var(--ink) }
svg text.note { font-size: 12px; fill: var(--soft); font-variant-numeric: tabular-nums }
svg .grid { stroke: var(--line); stroke-width: 1 }
svg .axis { stroke: var(--soft); stroke-width: 1 }
svg .most { stroke: var(--ink); stroke-width: 1.5 }
svg rect { stroke: var(--back); stroke-width: .6 }
.before { fill: var(--before); background: var(--before) } .replay { fill: var(--replay); background: var(--replay) }
.now { fill: var(--now); background: var(--now) } .skip { fill: var(--skip); background: var(--skip) }
.corrected { fill: var(--corrected); background: var(--corrected) } .new { fill: var(--new); background: var(--new) }
.gone { fill: var(--gone); background: var(--gone) }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.4rem; font-size: 13px }
.legend i { display: inline-block; width: 1.1em; height: .8em; margin-right: .45em }
.legend i.most { height: 2px; vertical-align: middle; background: var(--ink) }
@media print { :root { color-scheme: light } svg { min-width: 0 } }
"""

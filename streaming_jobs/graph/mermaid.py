"""A graph as Mermaid text, which GitHub, GitLab and many wikis draw: https://mermaid.js.org/syntax/flowchart.html."""

from __future__ import annotations

from streaming_jobs.graph.graph import Graph, Kind

_SHAPES: dict[Kind, tuple[str, str]] = {"topic": ("([", "])"), "stream": ("[", "]"), "table": ("[(", ")]")}
_LOOKS: dict[Kind, str] = {
    "topic": "fill:#fff3d6,stroke:#9a6700,color:#1f2328",
    "stream": "fill:#dbeafe,stroke:#0969da,color:#1f2328",
    "table": "fill:#dcf5e3,stroke:#1a7f37,color:#1f2328",
}


def mermaid(graph: Graph) -> str:
    """The flowchart, from left to right; nodes are numbered, since names may be words of Mermaid's own."""
    ids = {node: f"n{number}" for number, node in enumerate(graph.nodes)}
    lines = ["flowchart LR"]
    for node, name in ids.items():
        begin, end = _SHAPES[node.kind]
        lines.append(f'    {name}{begin}"{node.name}"{end}:::{node.kind}')
    lines += [f"    {ids[begin]} --> {ids[end]}" for begin, end in graph.edges]
    used = {node.kind for node in graph.nodes}
    lines += [f"    classDef {kind} {look}" for kind, look in _LOOKS.items() if kind in used]
    return "\n".join(lines) + "\n"

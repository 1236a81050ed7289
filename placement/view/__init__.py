"""The drawings of a plan: `html`, `svg` and `dot` each turn a Plan into text with `render(plan)`.

    Plan ─scene─ layout → Scene → HTML (bokeh) or SVG;   Plan → DOT

Nothing here decides anything: a drawing shows what the plan says, and what was measured beside it.
"""

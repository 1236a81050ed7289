"""The page around the figures: HTML, CSS and the few lines of JavaScript that link them.

The content policy in its head forbids every request, so that "opens offline" is what the browser
enforces and not what we hope.
"""

from __future__ import annotations

import re

# Runs when the graph is zoomed or resized: texts keep their size relative to their boxes.
ZOOM = """
const scale = plot.inner_width / Math.abs(plot.x_range.end - plot.x_range.start)
texts.forEach((text, i) => {
  const pixels = sizes[i] * scale
  text.visible = pixels >= 3.2
  if (text.visible) text.glyph.text_font_size = {value: pixels.toFixed(2) + "px"}
})
lines.forEach((line, i) => {
  line.glyph.line_width = {value: widths[i] * Math.min(Math.max(1.25 * scale, 0.3), 1.6)}
})
"""

# Runs when something is selected in either figure. Assigning indices runs it again, later: what it
# chose itself it knows by `gfChosen`.
LINK = """
const chosen = window.gfChosen ??= new Map()
if (chosen.get(tapped) === String(tapped.selected.indices)) return
const names = new Set(tapped.selected.indices.map(i => tapped.data.node[i]))
const pick = (column, keep) =>
  Array.from(column).map((value, i) => keep(value) ? i : -1).filter(i => i >= 0)
for (const source of [nodes, bars]) {
  const indices = pick(source.data.node, n => names.has(n))
  chosen.set(source, String(indices))
  source.selected.indices = indices
}
const touches = routes.map(([from, to]) => names.has(from) || to.some(n => names.has(n)))
for (const wire of wires) wire.selected.indices = pick(wire.data.route, r => touches[r])
window.gfDetail(nodes, routes, names)
"""

_CSS = """
:root { color-scheme: light dark; --ink: #1c2430; --faint: #5c6877; --paper: #f5f7f9;
  --card: #fff; --edge: #e1e6ec; --meter: #e6eaef; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e9f0; --faint: #97a3b3; --paper: #10141a;
  --card: #181e26; --edge: #2a323d; --meter: #2d3641; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 14px/1.5 Inter, "Helvetica Neue", Helvetica, Arial, sans-serif;
  font-variant-numeric: tabular-nums; -webkit-font-smoothing: antialiased; }
main { max-width: 1720px; margin: 0 auto; padding: 28px 28px 60px; }
h1 { font-size: 24px; letter-spacing: -.015em; margin: 0 0 2px; font-weight: 650; }
h2 { font-size: 15.5px; margin: 0; font-weight: 650; }
.faint, .tile p, .tile h3, th { color: var(--faint); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(205px, 1fr)); gap: 12px;
  margin: 20px 0 12px; }
.tile, section { background: var(--card); border: 1px solid var(--edge); border-radius: 10px; }
.tile { padding: 12px 16px; min-width: 0; }
.tile h3 { margin: 0; font-size: 12.5px; font-weight: 500; overflow-wrap: anywhere; }
.tile b { font-size: 25px; line-height: 1.35; font-weight: 600; letter-spacing: -.015em; }
.tile p { margin: 0; font-size: 12.5px; }
section { padding: 16px 18px 12px; margin-bottom: 12px; }
header { display: flex; flex-wrap: wrap; gap: 4px 18px; align-items: baseline; margin-bottom: 6px; }
header .faint { font-size: 12.5px; }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
th { text-align: left; font-weight: 500; font-size: 12.5px; }
th, td { padding: 4px 24px 4px 0; }
td { border-top: 1px solid var(--edge); }
i { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 8px;
  vertical-align: -1px; }
u { display: inline-block; width: 20px; height: 2.5px; margin-right: 7px; vertical-align: 4px; }
.meter { display: inline-block; width: 130px; height: 8px; border-radius: 4px; margin-right: 10px;
  background: var(--meter); overflow: hidden; vertical-align: 1px; }
.meter span { display: block; height: 100%; min-width: 2px; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 20px; font-size: 12.5px; color: var(--faint); }
input { font: inherit; font-size: 13px; padding: 4px 10px; border: 1px solid var(--edge);
  border-radius: 7px; background: var(--paper); color: inherit; width: 230px; margin-left: auto; }
aside { position: fixed; right: 22px; bottom: 22px; width: 430px; max-width: calc(100vw - 44px);
  max-height: 46vh; overflow: auto; background: var(--card); border: 1px solid var(--edge);
  border-radius: 10px; padding: 12px 16px; font-size: 13px; box-shadow: 0 8px 30px #0003;
  z-index: 9; overflow-wrap: anywhere; }
aside h2 { margin-bottom: 6px; }
dl { display: grid; grid-template-columns: 80px 1fr; gap: 2px 12px; margin: 0; }
dt { color: var(--faint); } dd { margin: 0; }
@media print { body { background: #fff; } section { break-inside: avoid; } input, aside {
  display: none; } }
"""

_JS = """
window.gfDetail = (nodes, routes, names) => {
  const box = document.getElementById("detail")
  box.replaceChildren()
  const all = Array.from(nodes.data.node)
  const chosen = all.map((n, i) => names.has(n) ? i : -1).filter(i => i >= 0)
  box.hidden = !chosen.length
  if (!chosen.length) return
  const add = (tag, text, to = box) => {
    const made = document.createElement(tag)
    made.textContent = text  // never as HTML: names are the user's
    to.append(made)
    return made
  }
  if (chosen.length > 1) {
    add("h2", chosen.length + " nodes")
    add("div", chosen.slice(0, 40).map(i => all[i]).join(", ") + (chosen.length > 40 ? ", …" : ""))
    return
  }
  const [i] = chosen
  add("h2", all[i])
  const list = add("dl", "")
  const row = (what, text) => { if (text) { add("dt", what, list); add("dd", text, list) } }
  for (const what of nodes.tags) row(what, nodes.data[what][i])
  row("reads", routes.filter(r => r[1].includes(all[i])).map(r => r[0]).join(", "))
  row("read by", routes.filter(r => r[0] === all[i]).flatMap(r => r[1]).join(", "))
}
const gfModel = name => Bokeh.documents.map(d => d.get_model_by_name(name)).find(m => m)
const gfDark = matchMedia("(prefers-color-scheme: dark)")
function gfTheme() {
  const timeline = gfModel("gf-timeline")
  if (!timeline) return void setTimeout(gfTheme, 50)
  const ink = gfDark.matches ? "#c3ccd8" : "#3c4856"
  for (const axis of [...timeline.below, ...timeline.left]) {
    axis.major_label_text_color = ink
    axis.axis_label_text_color = ink
  }
  gfModel("gf-lanes").glyph.fill_alpha = {value: gfDark.matches ? 0.09 : 0.35}
}
gfDark.addEventListener("change", gfTheme)
gfTheme()
document.getElementById("find").addEventListener("input", event => {
  const nodes = gfModel("gf-nodes"), text = event.target.value.toLowerCase()
  nodes.selected.indices = !text ? [] : Array.from(nodes.data.node)
    .map((n, i) => n.toLowerCase().includes(text) ? i : -1).filter(i => i >= 0)
})
"""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none';
 script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data: blob:;
 font-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>graphflow plan</title>
<style>$css</style>
$library
</head>
<body>
<main>
<h1>Where each node runs, and when</h1>
<div class="faint">$summary</div>
<div class="tiles">$tiles</div>
<section>
<table><thead><tr><th>Device<th>Nodes<th>Busy in a step<th>Peak memory</thead>
<tbody>$devices</tbody></table>
</section>
<section>
<header><h2>Timeline of a step</h2>
<span class="faint">drag to pan, Ctrl + wheel to zoom · dashed line: predicted end, dotted: measured
 end · grey: waiting for a tensor</span></header>
$timeline
</section>
<section>
<header><h2>The graph</h2>
<span class="faint">hover for details, click to follow a node into the timeline ·
 Ctrl + wheel to zoom</span>
<input id="find" type="search" placeholder="Find nodes by name" aria-label="Find nodes by name">
</header>
<div class="legend">$legend</div>
$graph
</section>
</main>
<aside id="detail" hidden></aside>
$script
<script>$js</script>
</body>
</html>
"""


def fill(**parts: str) -> str:
    """The page with its parts, which must be escaped already, in place. Each is put in once: a `$`
    in a user's name stays a `$`."""
    parts |= {"css": _CSS, "js": _JS}
    return re.sub(r"\$([a-z]+)", lambda match: parts[match[1]], _PAGE)

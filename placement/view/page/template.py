"""The page around the figures: HTML and CSS. What it does is in `html.SCRIPTS`.

The content policy in its head forbids every request, so that "opens offline" is what the browser
enforces and not what we hope.
"""

from __future__ import annotations

import re

_CSS = """
:root { color-scheme: light; --ink: #1c2430; --faint: #5c6877; --paper: #f5f7f9;
  --card: #fff; --edge: #e1e6ec; --meter: #e6eaef; --press: #e3ebf6; --pressed: #1f4e8c; }
:root[data-theme=dark] { color-scheme: dark; --ink: #e4e9f0; --faint: #97a3b3; --paper: #0e1217;
  --card: #151b23; --edge: #2a323d; --meter: #2d3641; --press: #24374f; --pressed: #a9cdf5; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 14px/1.5 Inter, "Helvetica Neue", Helvetica, Arial, sans-serif;
  font-variant-numeric: tabular-nums; -webkit-font-smoothing: antialiased; }
main { max-width: 1720px; margin: 0 auto; padding: 26px 28px 60px; }
h1 { font-size: 24px; letter-spacing: -.015em; margin: 0 0 2px; font-weight: 650; }
h2 { font-size: 15.5px; margin: 0; font-weight: 650; }
.faint, .tile p, .tile h3, th { color: var(--faint); }
.top { display: flex; align-items: start; justify-content: space-between; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(205px, 1fr)); gap: 12px;
  margin: 18px 0 12px; }
.tile, section { background: var(--card); border: 1px solid var(--edge); border-radius: 10px; }
.tile { padding: 12px 16px; min-width: 0; }
.tile h3 { margin: 0; font-size: 12.5px; font-weight: 500; overflow-wrap: anywhere; }
.tile b { font-size: 25px; line-height: 1.35; font-weight: 600; letter-spacing: -.015em; }
.tile p { margin: 0; font-size: 12.5px; }
section { padding: 16px 18px 12px; margin-bottom: 12px; position: relative; }
header { display: flex; flex-wrap: wrap; gap: 6px 18px; align-items: baseline; margin-bottom: 6px; }
header .faint { font-size: 12.5px; }
.scroll { max-height: 560px; overflow: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
th { text-align: left; font-weight: 500; font-size: 12.5px; }
th, td { padding: 4px 24px 4px 0; }
td { border-top: 1px solid var(--edge); }
i { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 8px;
  vertical-align: -1px; }
u { display: inline-block; width: 20px; height: 2.5px; margin-right: 7px; vertical-align: 4px; }
.meter { display: inline-block; width: 110px; height: 8px; border-radius: 4px; margin-right: 10px;
  background: var(--meter); overflow: hidden; vertical-align: 1px; }
.meter span { display: block; height: 100%; }
.bar { display: flex; flex-wrap: wrap; gap: 8px 14px; align-items: center; margin: 4px 0 8px; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 20px; font-size: 12.5px; color: var(--faint);
  min-height: 20px; }
button, input { font: inherit; font-size: 13px; color: inherit; background: var(--paper);
  border: 1px solid var(--edge); border-radius: 7px; padding: 3px 11px; }
button { cursor: pointer; } button:hover { border-color: var(--faint); }
button:focus-visible, input:focus-visible { outline: 2px solid #4a8fe0; outline-offset: 1px; }
button[aria-pressed=true] { background: var(--press); color: var(--pressed);
  border-color: var(--pressed); }
.several { display: inline-flex; align-items: center; }
.several span { font-size: 12.5px; color: var(--faint); margin-right: 8px; }
.several button { border-radius: 0; margin-left: -1px; }
.several span + button { border-radius: 7px 0 0 7px; margin-left: 0; }
.several button:last-child { border-radius: 0 7px 7px 0; }
.find { position: relative; margin-left: auto; display: flex; align-items: center; gap: 10px; }
.find span { font-size: 12.5px; color: var(--faint); white-space: nowrap; }
input { width: 270px; padding: 4px 11px; }
ul { position: absolute; right: 0; top: 34px; width: 470px; max-width: 90vw; max-height: 330px;
  overflow: auto; margin: 0; padding: 6px; list-style: none; background: var(--card); z-index: 9;
  border: 1px solid var(--edge); border-radius: 9px; box-shadow: 0 8px 30px #0003; }
li { padding: 3px 9px; border-radius: 6px; font-size: 12.5px; color: var(--faint); cursor: pointer;
  overflow-wrap: anywhere; }
li:hover { background: var(--press); } li b { color: var(--ink); font-weight: 550; }
#loading { position: absolute; inset: 0; display: grid; place-items: center; color: var(--faint);
  pointer-events: none; }
aside { position: fixed; right: 22px; bottom: 22px; width: 430px; max-width: calc(100vw - 44px);
  max-height: 46vh; overflow: auto; background: var(--card); border: 1px solid var(--edge);
  border-radius: 10px; padding: 12px 16px; font-size: 13px; box-shadow: 0 8px 30px #0003;
  z-index: 9; overflow-wrap: anywhere; }
aside h2 { margin: 8px 0 6px; }
.tools { display: flex; gap: 6px; flex-wrap: wrap; }
.tools button { font-size: 12px; padding: 2px 9px; } .tools button:last-child { margin-left: auto; }
dl { display: grid; grid-template-columns: 104px 1fr; gap: 2px 12px; margin: 0; }
dt { color: var(--faint); } dd { margin: 0; }
[hidden] { display: none !important; }
@media (max-width: 640px) { main { padding: 14px 10px 40px; } section { padding: 12px; }
  .tiles { grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 8px; }
  .meter { width: 60px; } th, td { padding-right: 14px; white-space: nowrap; }
  .find, input { width: 100%; margin: 0; } aside { right: 10px; bottom: 10px; } }
@media print { body { background: #fff; } section { break-inside: avoid; } input, aside, button {
  display: none; } }
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
<div class="top"><div><h1>Where each node runs, and when</h1>
<div class="faint">$summary</div></div><button id="theme">Dark</button></div>
<div class="tiles">$tiles</div>
<section>
<header><h2>The graph</h2>
<span class="faint">click a group to open it, its title to fold it, a node to follow it into the
 timeline · drag to pan, Ctrl + wheel to zoom</span></header>
<div class="bar">
<div class="several" id="by"><span>colour by</span><button data-by="device" aria-pressed="true"
>device</button><button data-by="op" aria-pressed="false">op</button><button data-by="time"
 aria-pressed="false">time</button><button data-by="memory" aria-pressed="false">memory</button>
</div>
<button id="critical" aria-pressed="false">Critical path</button>
<button id="open">Open all</button><button id="fold">Fold all</button>
<button id="fit">Whole graph</button>
<div class="find"><span id="found"></span>
<input id="find" type="search" placeholder="Find nodes by name or op" autocomplete="off"
 aria-label="Find nodes by name or op"><ul id="results" hidden></ul></div>
</div>
<div class="legend" id="legend"></div>
$graph
<div id="loading">reading the plan …</div>
</section>
$schedule
<section>
<header><h2>Timeline of a step</h2>
<span class="faint">click a bar to find its node · dashed line: predicted end, dotted: measured
 end · grey: waiting for a tensor$links</span></header>
<div class="scroll">$timeline</div>
<header><h2>Memory held</h2>
<span class="faint">predicted, by device, over the same time · dotted: the most that was
 measured</span></header>
$memory
</section>
<section>
<div class="scroll">
<table><thead><tr><th>Device<th>Nodes<th>Busy in a step<th>Peak memory</thead>
<tbody>$devices</tbody></table>
</div>
</section>
$ports
$taken
</main>
<aside id="detail" hidden></aside>
<script type="application/octet-stream" id="gf-plan">$plan</script>
$script
<script>
$js
</script>
</body>
</html>
"""


def fill(**parts: str) -> str:
    """The page with its parts, which must be escaped already, in place. Each is put in once: a `$`
    in a user's name stays a `$`."""
    parts |= {"css": _CSS}
    return re.sub(r"\$([a-z]+)", lambda match: parts[match[1]], _PAGE)

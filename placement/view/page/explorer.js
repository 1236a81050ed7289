// What the page does: selects, searches, links the drawings, and begins.
//
// Every text that a user chose reaches the page as text, never as HTML.

const START = [150, 110, 80, 60, 45, 34, 25, 16, 1], LEGIBLE = 0.72  // boxes at first; their scale
const MOST = 1200  // boxes beyond which "open all" stops

// Selecting ---------------------------------------------------------------------------------------

function mark(test) {
  state.mask = new Uint8Array(N)
  for (let i = 0; i < N; i++) if (test(i)) state.mask[i] = 1
  state.lit = prefix(i => state.mask[i])
}
function pick(item) {
  state.picked = item
  state.matches = null
  state.mask = state.lit = null
  if (item !== null) {
    const [from, to] = range(item)
    // What it reads and what reads it stay lit.
    const near = new Set()
    for (let e = 0; e < D.edges.to.length; e++) {
      const {to: t, from: f} = D.edges
      if (t[e] >= from && t[e] < to) near.add(f[e])
      if (f[e] >= from && f[e] < to) near.add(t[e])
    }
    mark(i => i >= from && i < to || near.has(i))
  }
  paint()
  timeline()
  panel()
}

// With what a node, or a group, runs as one kernel, and what that takes. A kernel is predicted as a
// whole; what its nodes take is their part of it.
function kernelFacts(item) {
  if (isGroup(item) && !isKernel(item)) return []
  const nodes = D.kernels[kernelOf[range(item)[0]]]
  if (!nodes) return []
  const [from, to] = range(item), sum = list => list.reduce((s, i) => s + D.nodes.took[i], 0)
  const inside = i => i >= from && i < to
  const all = nodes.every(inside), others = all ? nodes : nodes.filter(i => !inside(i))
  const names = others.slice(0, 12).map(i => D.nodes.name[i]).join(", ")
    + (others.length > 12 ? `, … (${others.length})` : "")
  const whole = sum(nodes), percent = share => `${three(100 * share)} %`
  const facts = [[all ? "one kernel of" : "one kernel with", names]]
  const step = D.makespan > 0 ? `${percent(whole / D.makespan)} of the step` : ""
  if (all) facts.push(["its share", step])
  else if (whole > 0)
    facts.push(["its share", `${percent(total("took", item) / whole)} of the kernel's ${
      seconds(whole)}${step && `, which are ${step}`}`])
  return facts
}

function panel() {
  const box = $("detail")
  box.replaceChildren()
  const item = state.picked
  box.hidden = item === null
  if (item === null) return
  const add = (tag, text, to = box) => {
    const made = document.createElement(tag)
    made.textContent = text
    to.append(made)
    return made
  }
  const button = (text, act) => { add("button", text, tools).onclick = act }
  const tools = add("div", "")
  tools.className = "tools"
  add("h2", fullName(item))
  const list = add("dl", "")
  const row = (what, text) => { if (text) { add("dt", what, list); add("dd", text, list) } }
  const told = tip(item)
  row(isGroup(item) ? "group" : "op", told.what)
  row("device", told.where)
  row("takes", told.took)
  row("makes", told.makes)
  for (const [what, text] of kernelFacts(item)) row(what, text)
  if (isGroup(item)) {
    const n = total("critical", item)
    if (n) row("critical", `${count(n, "node")} on the critical path`)
  } else {
    row("known from", D.nodes.bases[D.nodes.basis[item]])
    row("why here", told.why)
    row("made at", D.nodes.places[D.nodes.place[item]])
    if (state.critical[item]) row("critical", "on the critical path")
    const near = (mine, other) => D.edges[mine]
      .map((at, e) => at === item ? D.edges[other][e] : -1).filter(i => i >= 0)
    const names = found => found.slice(0, 12).map(i => D.nodes.name[i]).join(", ")
      + (found.length > 12 ? `, … (${found.length})` : "")
    row("reads", names(near("to", "from")))
    row("read by", names(near("from", "to")))
  }
  const open = isGroup(item) && state.open.has(item)
  if (isGroup(item)) button(open ? "Fold" : "Open", () => { toggle(item); panel() })
  const parent = parentOf(item)
  if (parent > N && state.open.has(parent) && state.boxes.has(item))
    button(`Fold ${shorten(labelOf(parent), 24)}`, () => { toggle(parent); pick(parent) })
  if (state.boxes.has(item)) button("Show", () => { lookAt(item); zoomed() })
  else button("Show in the graph", () => show(item))
  button("✕", () => pick(null))
}

function show(node) {
  change(undefined, () => reveal(node))
  pick(state.boxes.has(node) ? node : state.stand[node])
  lookAt(state.boxes.has(node) ? node : state.stand[node])
  zoomed()
}

function tapped({x, y}) {
  const found = state.items.map(item => state.boxes.get(item)).filter(b =>
    x >= b.x && x <= b.x + b.w && y >= b.y && y <= b.y + b.h)
  const b = found[found.length - 1]
  if (!b) return pick(null)
  const frame = isGroup(b.item) && state.open.has(b.item)
  if (frame && y > b.y + TITLE + 6) return pick(b.item)
  if (isGroup(b.item)) toggle(b.item)
  pick(b.item)
}

// Searching ---------------------------------------------------------------------------------------

function search(text) {
  const list = $("results"), wanted = text.trim().toLowerCase()
  list.replaceChildren()
  $("found").textContent = ""
  list.hidden = !wanted
  if (!wanted) return pick(null)
  state.picked = null
  panel()
  const op = D.nodes.ops.map(name => name.toLowerCase() === wanted)
  mark(i => op[D.nodes.op[i]] || D.nodes.name[i].toLowerCase().includes(wanted))
  state.matches = []
  for (let i = 0; i < N; i++) if (state.mask[i]) state.matches.push(i)
  $("found").textContent = `${state.matches.length.toLocaleString("en")} of ${N.toLocaleString("en")}`
  for (const i of state.matches.slice(0, 40)) {
    const line = document.createElement("li"), name = document.createElement("b")
    name.textContent = D.nodes.name[i]
    line.append(name, ` ${D.nodes.ops[D.nodes.op[i]]} · ${D.devices[D.nodes.device[i]].name}`)
    line.onmousedown = event => { event.preventDefault(); list.hidden = true; show(i) }
    list.append(line)
  }
  if (!state.matches.length) {
    const line = document.createElement("li")
    line.textContent = "no node of that name or op"
    list.append(line)
  }
  paint()
  timeline()
}

// Light and dark ----------------------------------------------------------------------------------

function wear(name) {
  dark = name === "dark"
  document.documentElement.dataset.theme = name
  $("theme").textContent = dark ? "Light" : "Dark"
  const t = theme()
  for (const plot of [model("gf-timeline"), model("gf-memory")]) {
    if (!plot) continue
    for (const axis of [...plot.above, ...plot.below, ...plot.left]) {
      axis.major_label_text_color = t.faint
      axis.axis_label_text_color = t.faint
    }
    for (const grid of plot.center) if ("grid_line_color" in grid && grid.grid_line_color)
      grid.grid_line_color = dark ? "#39434f" : "#dfe4ea"
  }
  for (const curve of D.memory) {
    const line = model(`gf-memory-${curve.device}`)
    if (line) line.glyph.line_color = {value: edgeOf(D.devices[curve.device].strong)}
  }
  paint()
  timeline()
}

// In a narrow window, the names of rows leave the room to their bars.
function narrow(here) {
  const times = model("gf-timeline"), held = model("gf-memory"), [, short] = times.tags
  const [names] = times.left, axis = [...times.above, ...times.below][0]
  wide ??= {left: times.min_border_left, labels: names.major_label_overrides, title: axis.axis_label}
  const told = here ? {...short, labels: new Map(short.labels)} : wide
  names.major_label_overrides = told.labels
  axis.axis_label = told.title
  for (const plot of [times, held]) {
    plot.min_border_left = told.left
    Bokeh.index.find_one_by_id(plot.id).invalidate_layout()
  }
}
let wide

// Begin -------------------------------------------------------------------------------------------

function later(act, wait = 30) {
  let timer
  return () => { clearTimeout(timer); timer = setTimeout(act, wait) }
}

// The ring around a figure that was clicked tells nothing.
function quiet(root) {
  for (const each of root.querySelectorAll("*")) if (each.shadowRoot) {
    const style = document.createElement("style")
    style.textContent = ":host, * { outline: none !important; }"
    each.shadowRoot.append(style)
    quiet(each.shadowRoot)
  }
}

async function begin() {
  while (!model("gf-graph")?.inner_width) await new Promise(done => setTimeout(done, 30))
  D = await unpack($("gf-plan").textContent.trim())
  D.unit = model("gf-timeline").tags[0]
  prepare()
  for (const limit of START) {  // as much as can be read
    openSome(limit)
    relayout()
    fit()
    if (state.view.scale >= LEGIBLE) break
  }
  const graph = model("gf-graph"), bars = model("gf-timeline")
  const chosen = matchMedia("(prefers-color-scheme: dark)")
  wear(chosen.matches ? "dark" : "light")
  chosen.addEventListener("change", () => wear(chosen.matches ? "dark" : "light"))
  $("theme").onclick = () => wear(dark ? "light" : "dark")
  for (const button of document.querySelectorAll("#by button"))
    button.onclick = () => {
      state.by = button.dataset.by
      for (const each of document.querySelectorAll("#by button"))
        each.setAttribute("aria-pressed", each === button)
      paint()
    }
  $("critical").onclick = () => {
    state.path = !state.path
    $("critical").setAttribute("aria-pressed", state.path)
    paint()
    timeline()
  }
  $("open").onclick = () => { change(undefined, () => openSome(MOST, true)) }
  $("fold").onclick = () => { change(undefined, () => { state.open = new Set([N]) }) }
  $("fit").onclick = () => { fit(); zoomed() }
  const find = $("find")
  find.oninput = later(() => search(find.value), 120)
  find.onkeydown = event => {
    if (event.key === "Enter" && state.matches?.length) {
      $("results").hidden = true
      show(state.matches[0])
    }
    if (event.key === "Escape") { find.value = ""; search("") }
  }
  find.onblur = () => { $("results").hidden = true }
  find.onfocus = () => { $("results").hidden = !find.value }
  graph.on_event("tap", tapped)
  bars.on_event("tap", tappedBar)
  const redraw = later(timeline)
  for (const name of ["start", "end"]) {
    bars.x_range.properties[name].change.connect(redraw)
    graph.x_range.properties[name].change.connect(later(zoomed, 10))
  }
  let size = [graph.inner_width, graph.inner_height]
  const resized = later(() => {  // the middle and the scale stay
    const now = [graph.inner_width, graph.inner_height], {x_range: xr, y_range: yr} = graph
    const [kx, ky] = [now[0] / size[0], now[1] / size[1]]
    const cx = (xr.start + xr.end) / 2, cy = (yr.start + yr.end) / 2
    const wide = (xr.end - xr.start) * kx / 2, high = (yr.start - yr.end) * ky / 2
    size = now
    xr.setv({start: cx - wide, end: cx + wide})
    yr.setv({start: cy + high, end: cy - high})
    if (!state.moved) fit()
    zoomed()
    timeline()
  }, 60)
  graph.properties.inner_width.change.connect(resized)
  graph.properties.inner_height.change.connect(resized)
  const scale = Math.min(1.35, 1.35 * graph.inner_width / (state.root.w + 48))
  const high = Math.min(720, Math.max(280, Math.round(state.root.h * scale + 90)))
  if (high < 720) graph.height = high  // now that its inner size is watched
  const small = matchMedia("(max-width: 640px)")
  if (small.matches) narrow(true)
  small.addEventListener("change", () => narrow(small.matches))
  document.querySelectorAll("section").forEach(quiet)
  $("loading").remove()
  window.gfReady = true
}

// For those who drive the page: what is shown, and where it is on the screen.
window.gfShown = () => state.items.map(item => fullName(item))
window.gfAt = (name, x, y) => {
  const plot = model(name), {x_range: xr, y_range: yr} = plot
  const view = Bokeh.index.find_one_by_id(plot.id), area = view.el.getBoundingClientRect()
  const box = view.frame.bbox
  return [
    area.left + box.left + (x - xr.start) / (xr.end - xr.start) * box.width,
    area.top + box.top + (y - yr.end) / (yr.start - yr.end) * box.height,
  ]
}
window.gfWhere = name => {
  const item = state.items.find(i => fullName(i) === name) ?? state.items.find(
    i => labelOf(i) === name)
  const b = state.boxes.get(item)
  return b ? gfAt("gf-graph", b.x + b.w / 2, b.y + Math.min(b.h / 2, 14)) : null
}

begin().catch(error => {
  $("loading").textContent = `This page cannot be drawn here: ${error.message}`
  console.error(error)
})

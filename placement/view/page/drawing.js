// Draws the graph and the timelines into the figures of the page, and what of them a window shows.
//
// Every text that a user chose reaches the page as text, never as HTML.

const KERNEL = "kernel: "  // how the labels of kernels begin
const CORNERS = {frames: 9, stacks: 5, nodes: 5}  // their radii at scale 1

// Drawing the graph -------------------------------------------------------------------------------

function strongOf(item) {
  if (state.by === "op") return state.opColour.get(opOf(item)) ?? OTHER
  return D.devices[devicesOf(item)[0][0]].strong
}
function frameFill(item, t) {
  return isKernel(item) ? mix(t.paper, strongOf(item), dark ? 0.16 : 0.08)
    : mix(t.paper, t.frame, [0.05, 0.11][ancestry(item).length % 2])
}
function amount(item) { return total(state.by === "memory" ? "bytes" : "took", item) }

function paint() {
  const t = theme()
  const boxes = state.items.map(item => state.boxes.get(item))
  const closed = boxes.filter(b => !isGroup(b.item) || !state.open.has(b.item))
  const frames = boxes.filter(b => isGroup(b.item) && state.open.has(b.item))
  const heat = state.by === "time" || state.by === "memory"
  const top = Math.max(1e-30, ...closed.map(b => amount(b.item)))
  const longest = Math.max(1e-30, ...closed.map(b => total("took", b.item)))
  // A group that was opened is looked at in its surroundings; a node, with its neighbours.
  const ofGroup = state.picked !== null && isGroup(state.picked)
  const lit = item => {
    if (state.picked === item) return true
    const sum = state.lit
    if (!sum || ofGroup) return !state.path || total("critical", item) > 0
    const [from, to] = range(item)
    return sum[to] > sum[from]
  }
  const alpha = b => lit(b.item) ? 1 : 0.22
  const fill = b => heat ? ramp(Math.sqrt(amount(b.item) / top)) : tint(strongOf(b.item))
  const line = b => {
    if (state.picked === b.item) return t.ink
    if (state.path && total("critical", b.item) > 0) return t.gold
    return heat ? mix(ramp(Math.sqrt(amount(b.item) / top)), t.ink, 0.35) : edgeOf(strongOf(b.item))
  }
  const width = b => state.picked === b.item ? 2.6
    : state.path && total("critical", b.item) > 0 ? 2.2 : 1.1
  const strong = c => {  // text on it must be light
    const [r, g, b] = parse(c)
    return 0.3 * r + 0.59 * g + 0.11 * b < 140
  }
  const ink = b => strong(fill(b)) ? "#ffffff" : "#1c2430"
  const soft = b => strong(fill(b)) ? "#c9d3df" : "#4d5866"
  // A folded group looks like a stack of cards.
  // One that runs as one kernel is one thing: a box with a double border.
  const stacks = closed.filter(b => isGroup(b.item))
  model("gf-stacks").data = columns(stacks.flatMap(b => isKernel(b.item) ? [{
    x: b.x + b.w / 2, y: b.y + b.h / 2, w: b.w + 8, h: b.h + 8, fill: t.paper, line: line(b),
    alpha: alpha(b),
  }] : [2, 1].map(k => ({
    x: b.x + b.w / 2 + 3.5 * k, y: b.y + b.h / 2 + 3.5 * k, w: b.w, h: b.h, fill: fill(b),
    line: line(b), alpha: alpha(b) * 0.75,
  }))), ["x", "y", "w", "h", "fill", "line", "alpha"])
  model("gf-nodes").data = columns(closed.map(b => ({
    x: b.x + b.w / 2, y: b.y + b.h / 2, w: b.w, h: b.h, fill: fill(b), line: line(b),
    alpha: alpha(b), width: width(b), item: b.item, node: fullName(b.item), ...tip(b.item),
  })), ["x", "y", "w", "h", "fill", "line", "alpha", "width", "item", "node", "what", "where",
    "took", "makes", "why"])
  model("gf-frames").data = columns(frames.map(b => ({
    x: b.x + b.w / 2, y: b.y + b.h / 2, w: b.w, h: b.h,
    line: state.path && total("critical", b.item) > 0 ? mix(t.paper, t.gold, 0.7)
      : state.picked === b.item ? t.ink
        : isKernel(b.item) ? edgeOf(strongOf(b.item)) : mix(t.paper, t.frame, 0.45),
    fill: frameFill(b.item, t),
  })), ["x", "y", "w", "h", "line", "fill"])
  model("gf-titles").data = columns(frames.map(b => ({
    x: b.x + 12, y: b.y + 15, ink: t.faint, behind: frameFill(b.item, t),
    text: "▾ " + fitted(labelOf(b.item), "title", b.w - 40),
  })), ["x", "y", "text", "ink", "behind"])
  model("gf-labels").data = columns(closed.map(b => ({
    x: b.x + b.w / 2, y: b.y + 13.5, text: fitted(boxLabel(b.item), "label", b.w - 12), ink: ink(b),
    alpha: alpha(b),
  })), ["x", "y", "text", "ink", "alpha"])
  model("gf-details").data = columns(closed.map(b => ({
    x: b.x + b.w / 2, y: b.y + 26.5, text: fitted(detail(b.item), "detail", b.w - 12), ink: soft(b),
    alpha: alpha(b),
  })), ["x", "y", "text", "ink", "alpha"])
  model("gf-heat").data = columns(closed.flatMap(b => bars(b, longest, alpha(b))),
    ["left", "right", "top", "bottom", "fill", "alpha"])
  paintWires(lit, t)
  paintLegend(t)
  zoomed()
}

// The seconds of a box, against the longest box's, in parts by device.
function bars(b, longest, alpha) {
  const share = total("took", b.item) / longest
  if (share < 0.004) return []
  const parts = devicesOf(b.item), sum = parts.reduce((s, [, took]) => s + took, 0)
  let left = b.x + 7
  return parts.map(([device, took]) => {
    const wide = (b.w - 14) * share * took / sum
    left += wide
    return {
      left: left - wide, right: left, top: b.y + b.h - 5.2, bottom: b.y + b.h - 2.4,
      fill: edgeOf(D.devices[device].strong), alpha,
    }
  })
}

function columns(rows, names) {
  return Object.fromEntries(names.map(name => [name, rows.map(row => row[name] ?? "")]))
}
function fullName(item) {
  if (!isGroup(item)) return D.nodes.name[item]
  const path = G.path[item - N], label = G.label[item - N]
  if (isKernel(item) && label.includes(KERNEL))
    return (path ? path + ": " : "") + label.slice(label.indexOf(KERNEL))
  return label.includes(" … ") ? (path ? `${path}: ${label}` : label) : path
}
const boxLabel = item => isKernel(item) ? labelOf(item).replace(KERNEL, "") : labelOf(item)
function detail(item) {
  if (!isGroup(item)) {
    const output = D.nodes.outputs[D.nodes.output[item]], at = output.indexOf("(")
    return at < 0 ? D.nodes.ops[D.nodes.op[item]] : output.slice(at)
  }
  const own = G.own[item - N], n = total("nodes", item)
  if (own >= 0) return `${D.nodes.ops[D.nodes.op[own]]} · holds ${count(
    range(item)[1] - range(item)[0] - 1, "node")}`
  const took = seconds(total("took", item))
  return isKernel(item) ? `kernel of ${n} · ${took}` : `${count(n, "node")} · ${took}`
}
function tip(item) {
  const measured = total("measured", item), sum = total("took", item)
  const took = isGroup(item) ? seconds(sum) : interval(sum, D.nodes.low[item], D.nodes.high[item])
  const times = measured > 0 ? `${took} predicted, ${seconds(measured)} measured` : took
  const where = devicesOf(item).slice(0, 3).map(([d]) => D.devices[d].name).join(", ")
    + (devicesOf(item).length > 3 ? ", …" : "")
  if (isGroup(item))
    return {
      what: `${count(total("nodes", item), "node")}, mostly ${D.nodes.ops[opOf(item)]}`, where,
      took: times, makes: bytes(total("bytes", item)),
      why: isKernel(item) ? "one kernel; click to open" : "click to open",
    }
  return {
    what: D.nodes.ops[D.nodes.op[item]], where, why: D.nodes.whys[D.nodes.why[item]],
    took: D.nodes.held[item] ? "as part of the node around it"
      : `${times}, from ${seconds(D.nodes.start[item])}`,
    makes: D.nodes.outputs[D.nodes.output[item]]
      + (D.nodes.held[item] ? "" : ` · ${bytes(D.nodes.bytes[item])}`),
  }
}

function ends(wire) {
  const a = state.boxes.get(wire.a), b = state.boxes.get(wire.b)
  const within = (frame, inner) => ancestry(inner.item).includes(frame.item)
  if (isGroup(a.item) && within(a, b)) return [[a.x + a.w / 2, a.y + TITLE], [b.x + b.w / 2, b.y], 1]
  if (isGroup(b.item) && within(b, a))
    return [[a.x + a.w / 2, a.y + a.h], [b.x + b.w / 2, b.y + b.h], 1]
  const next = wire.points?.[0] ?? [b.x + b.w / 2, b.y + b.h / 2]
  const before = wire.points?.length ? wire.points[wire.points.length - 1] : [0, a.y + a.h / 2]
  const down = next[1] > a.y + a.h / 2, into = before[1] < b.y + b.h / 2
  const shift = down && into ? 0 : 0.18  // edges against the data's way run beside the others
  return [
    [a.x + a.w * (0.5 + shift), down ? a.y + a.h : a.y],
    [b.x + b.w * (0.5 + shift), into ? b.y : b.y + b.h], into ? 1 : -1,
  ]
}

function paintWires(lit, t) {
  const plain = [], cut = [], heads = []
  for (const wire of state.edges) {
    const [start, end, into] = ends(wire)
    const tipAt = [end[0], end[1] - 6 * into]
    const points = [start, ...wire.points ?? [], tipAt]
    const on = state.lit && !(state.picked !== null && isGroup(state.picked))
      ? touches(wire) : !state.path || wire.critical
    const near = on && state.picked !== null && !isGroup(state.picked)
    const colour = state.path && wire.critical ? t.gold : wire.cut ? t.cut
      : near ? mix(t.wire, t.ink, 0.55) : t.wire
    const row = {
      colour, alpha: on ? (wire.cut || wire.critical && state.path ? 0.95 : 0.85) : 0.1,
      width: (wire.cut ? 1.8 : 1.1) * (state.path && wire.critical ? 1.5 : 1)
        * Math.min(2, 1 + Math.log10(wire.n) / 3),
    }
    for (let k = 0; k + 1 < points.length; k++) {
      const [x0, y0] = points[k], [x1, y1] = points[k + 1]
      const ym = (y0 + y1) / 2
      const out = (wire.cut || colour === t.gold ? cut : plain)
      out.push({...row, x0, y0, x1, y1, xa: x0, ya: ym, xb: x1, yb: ym})
    }
    heads.push({
      xs: [end[0] - 3.6, end[0] + 3.6, end[0]],
      ys: [end[1] - 7 * into, end[1] - 7 * into, end[1]], colour, alpha: row.alpha,
    })
  }
  const names = ["x0", "y0", "x1", "y1", "xa", "ya", "xb", "yb", "colour", "alpha", "width"]
  model("gf-wires").data = columns(plain, names)
  model("gf-cuts").data = columns(cut, names)
  model("gf-heads").data = columns(heads, ["xs", "ys", "colour", "alpha"])
}
function touches(wire) {
  if (state.picked !== null) {
    const stand = state.boxes.has(state.picked) ? state.picked : state.stand[state.picked]
    return wire.a === stand || wire.b === stand
  }
  const has = item => {
    const [from, to] = range(item)
    return state.lit[to] > state.lit[from]
  }
  return has(wire.a) && has(wire.b)
}

function paintLegend(t) {
  const box = $("legend")
  box.replaceChildren()
  const add = (text, style, tag = "i") => {
    const span = document.createElement("span"), mark = document.createElement(tag)
    for (const [key, value] of Object.entries(style)) mark.style.setProperty(key, value)
    span.append(mark, text)
    box.append(span)
  }
  const swatch = strong => ({background: tint(strong), border: `1.5px solid ${edgeOf(strong)}`})
  if (state.by === "device")
    D.devices.slice(0, 16).forEach(d => add(d.name, swatch(d.strong)))
  if (state.by === "device" && D.devices.length > 16) add(`… ${D.devices.length - 16} more`, {})
  if (state.by === "op") {
    for (const [op, colour] of state.opColour) add(D.nodes.ops[op], swatch(colour))
    if (D.nodes.ops.length > OPS.length) add("other ops", swatch(OTHER))
  }
  if (state.by === "time" || state.by === "memory") {
    const items = state.items.filter(item => !isGroup(item) || !state.open.has(item))
    const top = Math.max(0, ...items.map(amount)), show = state.by === "time" ? seconds : bytes
    const steps = [0, 0.25, 0.5, 0.75, 1].map(s => `${ramp(s)} ${s * 100}%`).join(", ")
    const what = state.by === "time" ? "computing" : "of outputs"
    add(`0 to ${show(top)} ${what}`, {
      width: "120px", height: "10px", background: `linear-gradient(90deg, ${steps})`,
    })
  }
  add("a tensor leaves its device", {background: t.cut}, "u")
  add("stays on it", {background: t.wire}, "u")
  if (state.path) add("critical path", {background: t.gold}, "u")
  if (D.kernels.length) add("one kernel", {border: `3px double ${t.frame}`})
  add("bar in a box: its seconds, against the longest box's", {display: "none"})
}

// The window on the graph -------------------------------------------------------------------------

function look(x, y, w, h, most = 1.35) {
  const plot = model("gf-graph")
  const wide = plot.inner_width || 1200, high = plot.inner_height || 700
  const scale = Math.min(wide / (w + 48), high / (h + 48), most)
  const cx = x + w / 2, cy = y + h / 2
  state.view = {cx, cy, scale}
  plot.x_range.setv({start: cx - wide / scale / 2, end: cx + wide / scale / 2})
  plot.y_range.setv({start: cy + high / scale / 2, end: cy - high / scale / 2})
}
const fit = () => look(0, 0, state.root.w, state.root.h)
function lookAt(item) {
  const b = state.boxes.get(item)
  const spare = isGroup(item) && state.open.has(item) ? 40 : 420
  look(b.x - spare, b.y - spare / 2, b.w + 2 * spare, b.h + spare)
}

// Texts and corners keep their size relative to their boxes; texts that nobody could read vanish.
function zoomed() {
  const plot = model("gf-graph")
  const scale = plot.inner_width / Math.abs(plot.x_range.end - plot.x_range.start)
  if (!isFinite(scale)) return
  for (const [kind, pixels] of Object.entries(PIXELS)) {
    const text = model(`gf-${kind}-text`), size = pixels * scale
    text.visible = size >= 3.4
    if (text.visible) text.glyph.text_font_size = {value: size.toFixed(1) + "px"}
  }
  for (const [kind, radius] of Object.entries(CORNERS))
    model(`gf-${kind}-drawn`).glyph.border_radius = Math.round(radius * Math.min(1, scale))
}

// Changes what is open, and keeps `anchor` where it is on the screen.
function change(anchor, act) {
  const plot = model("gf-graph")
  const before = anchor === undefined ? null : {...state.boxes.get(anchor)}
  const {x_range: xr, y_range: yr} = plot
  state.moved = true
  act()
  relayout()
  const after = anchor === undefined ? null : state.boxes.get(anchor)
  if (!before || !after) fit()
  else {
    const dx = after.x + after.w / 2 - before.x - before.w / 2, dy = after.y - before.y
    const wide = xr.end - xr.start, high = yr.start - yr.end
    if (after.w > wide || after.h > high) lookAt(anchor)
    else {
      // An opened group that would lie outside of the window is moved into it.
      const over = Math.max(0, after.y + after.h + 24 - (yr.start + dy))
      xr.setv({start: xr.start + dx, end: xr.end + dx})
      yr.setv({start: yr.start + dy + over, end: yr.end + dy + over})
    }
  }
  paint()
}

function toggle(item) {
  change(item, () => {
    if (state.open.delete(item)) return
    state.open.add(item)
  })
}

// Timelines ---------------------------------------------------------------------------------------

// The node whose seconds a node takes: itself, or the one whose body it is a part of.
function timed(node) {
  for (let at = node; at >= 0; at = parentOf(at)) {
    if (!isGroup(at) && !D.nodes.held[at]) return at
    if (isGroup(at) && G.own[at - N] >= 0 && !D.nodes.held[G.own[at - N]]) return G.own[at - N]
  }
  return node
}

// Bars that are narrower than a pixel are drawn as one where they touch.
function timeline() {
  const plot = model("gf-timeline"), T = D.timeline, {row, start, took, node, kind} = T.bars
  const unit = D.unit, pixel = (plot.x_range.end - plot.x_range.start) * unit
    / (plot.inner_width || 1000)
  const low = plot.x_range.start * unit, high = plot.x_range.end * unit
  const out = []
  let open = null
  const close = () => { if (open) out.push(open); open = null }
  const t = theme()
  for (let i = 0; i < row.length; i++) {
    const end = start[i] + took[i]
    if (end < low || start[i] > high) continue
    const lit = !state.mask && !(state.path && !(node[i] >= 0 && state.critical[node[i]]))
      || state.mask && node[i] >= 0 && (state.picked !== null && !isGroup(state.picked)
        ? node[i] === timed(state.picked) : state.picked !== null
          ? node[i] >= range(state.picked)[0] && node[i] < range(state.picked)[1]
          : state.mask[node[i]] > 0)
    const small = took[i] < 1.5 * pixel
    if (open && open.row === row[i] && small && open.kind === kind[i] && open.lit === lit
      && start[i] - open.end < 1.2 * pixel) {
      open.end = Math.max(open.end, end)
      open.n++
      continue
    }
    close()
    open = {row: row[i], start: start[i], end, n: 1, i, kind: kind[i], lit}
    if (!small) close()
  }
  close()
  // Waits first, so that what was done lies over what was waited for.
  out.sort((a, b) => (b.kind === 2) - (a.kind === 2) || a.lit - b.lit)
  const kinds = ["compute", "transfer", "wait", "send"]
  model("gf-bars").data = columns(out.map(b => {
    const r = T.rows[b.row], name = node[b.i] >= 0 ? D.nodes.name[node[b.i]] : T.texts[T.bars.text[b.i]]
    const strong = r.device < 0 ? t.cut : edgeOf(D.devices[r.device].strong)
    return {
      left: b.start / unit, right: Math.max(b.end, b.start + (state.mask && b.lit ? 2.5 : 0.8) * pixel) / unit,
      top: b.row + 0.14, bottom: b.row + 0.86, node: b.n > 1 ? -1 : node[b.i],
      colour: b.kind === 2 ? t.none
        : state.path && b.lit && !state.mask && !r.measured ? t.gold : strong,
      alpha: (b.kind === 2 ? 0.45 : r.measured ? 0.72 : 1) * (b.lit ? 1 : 0.13),
      line: b.n > 1 || b.end - b.start < 4 * pixel ? 0 : 0.6, edge: t.paper,
      name: b.n > 1 ? `${b.n} bars, too short to tell apart here` : name,
      what: `${kinds[b.kind]}, ${r.measured ? "measured" : "predicted"}`,
      took: `${seconds(b.end - b.start)}, from ${seconds(b.start)} to ${seconds(b.end)}`,
    }
  }), ["left", "right", "top", "bottom", "node", "colour", "alpha", "line", "edge", "name", "what",
    "took"])
}

function tappedBar({x, y}) {
  const {left, right, top, bottom, node} = model("gf-bars").data
  for (let i = left.length - 1; i >= 0; i--)
    if (x >= left[i] && x <= right[i] && y >= top[i] && y <= bottom[i] && node[i] >= 0) {
      pick(node[i])
      const item = state.boxes.has(node[i]) ? node[i] : state.stand[node[i]]
      const b = state.boxes.get(item), {x_range: xr, y_range: yr} = model("gf-graph")
      if (b.x < xr.start || b.x + b.w > xr.end || b.y < yr.end || b.y + b.h > yr.start)
        lookAt(item), zoomed()
      return
    }
  pick(null)
}

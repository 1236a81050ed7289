// What the page does: opens and folds groups, colours, selects, searches, and links the drawings.
//
// A node is a number below N, a group is N + its number; both are "items". The nodes of a group are
// the range [from, to). Every text that a user chose reaches the page as text, never as HTML.

const KERNEL = "kernel: "  // how the labels of kernels begin
const BOX_W = 158, BOX_H = 40
// Sizes of the graph's texts and radii of its corners, at scale 1.
const PIXELS = {label: 11.5, detail: 9.6, title: 11.5}, CORNERS = {frames: 9, stacks: 5, nodes: 5}
const START = [150, 110, 80, 60, 45, 34, 25, 16, 1], LEGIBLE = 0.72  // boxes at first; their scale
const MOST = 1200  // boxes beyond which "open all" stops
const $ = id => document.getElementById(id)
const model = name => Bokeh.documents.map(d => d.get_model_by_name(name)).find(m => m)

// Numbers as text ---------------------------------------------------------------------------------

const three = v => Math.abs(v) >= 99.95 ? v.toFixed(0) : String(+v.toPrecision(3))
function seconds(v) {
  for (const [unit, name] of [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]])
    if (v >= unit) return `${three(v / unit)} ${name}`
  return v ? `${three(v / 1e-9)} ns` : "0 s"
}
function bytes(v) {
  for (const [unit, name] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [1024, "KiB"]])
    if (v >= unit) return `${three(v / unit)} ${name}`
  return `${v} B`
}
window.gfBytes = bytes
const count = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`
function shorten(text, letters) {
  const all = [...text]
  if (all.length <= letters) return text
  const head = Math.ceil((letters - 1) / 2), tail = all.length - (letters - 1 - head)
  return `${all.slice(0, head).join("")}…${all.slice(tail).join("")}`
}
const pen = document.createElement("canvas").getContext("2d")
// A text of the graph on one line, shortened to what `wide` pixels hold in its font.
function fitted(text, kind, wide) {
  const {text_font: font, text_font_style: style} = model(`gf-${kind}-text`).glyph
  pen.font = `${style.value} ${PIXELS[kind]}px ${font.value}`
  const line = text.replace(/\s+/g, " ")
  let short = shorten(line, Math.ceil(wide / 2)), takes
  while ((takes = pen.measureText(short).width) > wide) {
    const letters = [...short].length
    if (letters === 1) break
    short = shorten(line, Math.min(letters - 1, Math.floor(letters * wide / takes) + 1))
  }
  return short
}

// Colours -----------------------------------------------------------------------------------------

let dark = false
const parse = hex => [1, 3, 5].map(i => parseInt(hex.slice(i, i + 2), 16))
const mix = (a, b, share) => "#" + parse(a).map((v, i) =>
  Math.round(v + (parse(b)[i] - v) * share).toString(16).padStart(2, "0")).join("")
const theme = () => dark
  ? {paper: "#151b23", ink: "#e4e9f0", faint: "#97a3b3", wire: "#5a6675", frame: "#8fa3bd",
     cut: "#ff5c93", gold: "#ffc53d", none: "#3a4552"}
  : {paper: "#ffffff", ink: "#1c2430", faint: "#5c6877", wire: "#a3adba", frame: "#6b7f99",
     cut: "#d0105a", gold: "#e69500", none: "#b4bdc9"}
const tint = strong => mix(theme().paper, strong, dark ? 0.3 : 0.17)
const edgeOf = strong => dark ? mix(strong, "#ffffff", 0.18) : strong
const RAMP = ["#e8eef6", "#b8d4ea", "#74add1", "#3f7fba", "#2a4f9e"]
const RAMP_DARK = ["#26313e", "#27506f", "#2d7aa8", "#46a8d4", "#a5e1f7"]
function ramp(share) {
  const colours = dark ? RAMP_DARK : RAMP
  const at = Math.min(Math.max(share, 0), 1) * (colours.length - 1), low = Math.floor(at)
  return mix(colours[low], colours[Math.min(low + 1, colours.length - 1)], at - low)
}
const OPS = ["#3a6fb8", "#e08a2e", "#2f9468", "#8456b8", "#1f93a8", "#c25a48", "#98872a",
  "#5b6bc0", "#8b6249", "#6d8f35"]
const OTHER = "#7a8592"

// The plan ----------------------------------------------------------------------------------------

let D, N, G, state, sums, kids, groupOf, kernelOf
const isGroup = item => item >= N
const range = item => isGroup(item) ? [G.from[item - N], G.to[item - N]] : [item, item + 1]
const labelOf = item => isGroup(item) ? G.label[item - N] || "everything" : D.nodes.label[item]
const isKernel = item => isGroup(item) && G.kernel[item - N] > 0
const parentOf = item => isGroup(item)
  ? (G.parent[item - N] < 0 ? -1 : G.parent[item - N] + N) : groupOf[item]
const total = (name, item) => {
  const [from, to] = range(item)
  return sums[name][to] - sums[name][from]
}

async function unpack(text) {
  const packed = Uint8Array.from(atob(text), c => c.charCodeAt(0))
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"))
  return JSON.parse(await new Response(stream).text())
}

function prefix(at) {
  const sum = new Float64Array(N + 1)
  for (let i = 0; i < N; i++) sum[i + 1] = sum[i] + at(i)
  return sum
}

function prepare() {
  N = D.nodes.name.length
  G = D.groups
  kids = G.label.map(() => [])
  groupOf = new Int32Array(N)
  const owned = new Set(G.own)
  const open = [N]
  let next = 1
  for (let i = 0; i < N; i++) {  // groups are numbered as they begin: walk both at once
    while (next < G.label.length && G.from[next] <= i) {
      kids[G.parent[next]].push(N + next)
      open.push(N + next++)
    }
    while (range(open[open.length - 1])[1] <= i) open.pop()
    const group = open[open.length - 1]
    groupOf[i] = group
    if (!owned.has(i)) kids[group - N].push(i)
  }
  kernelOf = new Int32Array(N).fill(-1)
  D.kernels.forEach((nodes, k) => nodes.forEach(i => { kernelOf[i] = k }))
  const top = Object.entries(D.nodes.op.reduce((seen, op) => {
    seen[op] = (seen[op] ?? 0) + 1
    return seen
  }, {})).sort((a, b) => b[1] - a[1] || a[0] - b[0]).slice(0, OPS.length).map(([op]) => +op)
  const critical = new Uint8Array(N)
  for (const i of D.critical) critical[i] = 1
  state = {
    open: new Set(), by: "device", picked: null, mask: null, matches: null, path: false,
    opColour: new Map(top.map((op, i) => [op, OPS[i]])), critical, items: [], edges: [],
    readers: null, moved: false,
  }
  sums = {
    took: prefix(i => D.nodes.took[i]), bytes: prefix(i => D.nodes.bytes[i]),
    nodes: prefix(i => 1 - D.nodes.held[i]), critical: prefix(i => critical[i]),
    measured: prefix(i => Math.max(0, D.nodes.measured[i])),
  }
}

// What a group has most of, by seconds, and by number where nothing takes time.
function most(item, column) {
  const [from, to] = range(item)
  const seen = new Map()
  for (let i = from; i < to; i++)
    seen.set(column[i], (seen.get(column[i]) ?? 0) + D.nodes.took[i] + 1e-12)
  return [...seen].sort((a, b) => b[1] - a[1])
}
const shares = new Map()
function devicesOf(item) {
  if (!shares.has(item)) shares.set(item, most(item, D.nodes.device))
  return shares.get(item)
}
const opShares = new Map()
function opOf(item) {
  if (!opShares.has(item)) opShares.set(item, most(item, D.nodes.op)[0][0])
  return opShares.get(item)
}

// Opening and folding -----------------------------------------------------------------------------

function openSome(limit, bodies) {
  state.open = new Set([N])
  let shown = kids[0].length
  let turn = kids[0].filter(isGroup)
  while (turn.length) {  // level by level, small groups first
    const next = []
    turn.sort((a, b) => kids[a - N].length - kids[b - N].length)
    for (const item of turn) {
      const inside = kids[item - N]
      const closed = G.own[item - N] >= 0 || isKernel(item)  // one thing, at first
      if (shown + inside.length > limit || !bodies && closed) continue
      state.open.add(item)
      shown += inside.length
      next.push(...inside.filter(isGroup))
    }
    turn = next
  }
}
function reveal(node) {
  for (let at = groupOf[node]; at >= 0; at = parentOf(at)) {
    if (isGroup(at) && G.own[at - N] === node) continue
    state.open.add(at)
  }
}
function shownItems() {
  const found = []
  const visit = item => {
    if (item !== N) found.push(item)
    if (isGroup(item) && state.open.has(item)) kids[item - N].forEach(visit)
  }
  visit(N)
  return found
}

// The item that stands for each node: itself, the folded group around it, or the frame it owns.
function standIns(items) {
  const stand = new Int32Array(N).fill(-1)
  for (const item of items) {
    const [from, to] = range(item)
    if (!isGroup(item) || !state.open.has(item)) stand.fill(item, from, to)
    else if (G.own[item - N] >= 0) stand[G.own[item - N]] = item
  }
  return stand
}

function relayout() {
  const items = shownItems()
  const stand = standIns(items)
  const wires = new Map()
  const {to, from} = D.edges
  const client = D.devices.map(d => d.client)
  const onPath = new Set(D.critical.slice(1).map((b, i) => D.critical[i] * N + b))
  for (let e = 0; e < to.length; e++) {
    const a = stand[from[e]], b = stand[to[e]]
    if (a === b || a < 0 || b < 0) continue
    const key = a * (N + G.label.length) + b
    let wire = wires.get(key)
    if (!wire) wires.set(key, wire = {a, b, cut: false, critical: false, n: 0, bytes: 0, last: -1})
    const source = D.nodes.device[from[e]]
    wire.n++
    if (from[e] !== wire.last) wire.bytes += D.nodes.bytes[from[e]]
    wire.last = from[e]
    wire.cut ||= source !== D.nodes.device[to[e]] && !client[source]
    wire.critical ||= onPath.has(from[e] * N + to[e])
  }
  state.edges = [...wires.values()]
  state.stand = stand
  const boxes = new Map([N, ...items].map(item => [item, {item}]))
  partWires()
  const root = place(N, boxes)
  root.x = root.y = 0
  settlePositions(N, boxes, 0, 0)
  for (const wire of state.edges) if (wire.via) wire.points = [
    ...wire.leaves.flatMap(port => portPoints(port, boxes)),
    ...moved(wire.via, boxes.get(wire.frame)),
    ...wire.enters.flatMap(port => portPoints(port, boxes).reverse()),
  ]
  state.root = {w: root.w, h: root.h}
  state.boxes = boxes
  state.items = items
}

function ancestry(item) {
  const path = []
  for (let at = item; at >= 0; at = parentOf(at)) path.push(at)
  return path.reverse()
}

// Each edge belongs to the frame in which its ends part, and leaves those within at a side.
function partWires() {
  state.inside = new Map()
  state.ports = new Map()
  for (const wire of state.edges) {
    const a = ancestry(wire.a), b = ancestry(wire.b)
    let k = 0
    while (k + 1 < a.length && k + 1 < b.length && a[k + 1] === b[k + 1]) k++
    wire.frame = a[k]
    wire.ways = [a.slice(k + 1), b.slice(k + 1)]
    ;[[wire.from], [wire.to]] = wire.ways
    if (wire.from === undefined || wire.to === undefined) continue  // a frame and its content
    if (!state.inside.has(wire.frame)) state.inside.set(wire.frame, [])
    state.inside.get(wire.frame).push(wire)
  }
  for (const wires of state.inside.values()) {
    const pair = wire => [range(wire.from)[0], range(wire.to)[0]]
    const isDown = downward(wires.map(pair))
    for (const wire of wires) {
      const [out, into] = isDown(pair(wire)) ? ["bottom", "top"] : ["top", "bottom"]
      wire.leaves = portsOf(wire.ways[0], out).reverse()
      wire.enters = portsOf(wire.ways[1], into)
    }
  }
}

// Where an edge leaves open frames, outermost first, each in the next: [frame, side and child].
function portsOf(way, side) {
  return way.slice(1).map((child, i) => {
    const port = `${side} ${child}`
    if (!state.ports.has(way[i])) state.ports.set(way[i], new Set())
    state.ports.get(way[i]).add(port)
    return [way[i], port]
  })
}
const portPoints = ([frame, port], boxes) =>
  moved(boxes.get(frame).ports.get(port), boxes.get(frame))
const moved = (points, box) => points.map(
  ([x, y]) => [x + box.x + box.pad, y + box.y + box.pad + box.title])

// Lay out a group, its open groups first; gives its boxes their places inside it.
function place(group, boxes) {
  const members = kids[group - N]
  const items = members.map(item => {
    const box = boxes.get(item)
    if (isGroup(item) && state.open.has(item)) place(item, boxes)
    else Object.assign(box, {w: BOX_W, h: BOX_H})
    box.lane = devicesOf(item)[0][0]
    return box
  })
  const at = new Map(members.map((item, i) => [item, i]))
  const pairs = (state.inside.get(group) ?? []).map(w => [at.get(w.from), at.get(w.to)])
  const ports = new Map([...state.ports.get(group) ?? []].map(port => {
    const [side, child] = port.split(" ")
    return [port, `${side} ${at.get(+child)}`]
  }))
  const made = layered(items, pairs, [...ports.values()])
  const box = boxes.get(group)
  const pad = group === N ? 0 : PAD, title = group === N ? 0 : TITLE
  for (const wire of state.inside.get(group) ?? [])
    wire.via = made.paths.get(`${at.get(wire.from)},${at.get(wire.to)}`) ?? []
  box.ports = new Map([...ports].map(([port, key]) => [port, made.paths.get(key)]))
  Object.assign(box, {
    w: Math.max(made.w + 2 * pad, group === N ? 0 : 130), h: made.h + 2 * pad + title, pad, title,
  })
  return box
}

function settlePositions(group, boxes, x, y) {
  const box = boxes.get(group)
  const left = x + box.pad, top = y + box.pad + box.title
  for (const item of kids[group - N]) {
    const inner = boxes.get(item)
    inner.x += left
    inner.y += top
    if (isGroup(item) && state.open.has(item)) settlePositions(item, boxes, inner.x, inner.y)
  }
}

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
  const took = seconds(total("took", item)), measured = total("measured", item)
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

// What is shown of the plan, and where: which groups are open, and boxes and edges laid out.
//
// A node is a number below N, a group is N + its number; both are "items". The nodes of a group are
// the range [from, to). What is in a frame is laid out by `layered`, from the inside to the outside.

const BOX_W = 158, BOX_H = 40

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

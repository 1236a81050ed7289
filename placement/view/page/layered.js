// Where boxes go: each open group is a frame, laid out by itself in layers from top to bottom, and
// then a box of its own in the group around it. Order in a layer by barycentres, coordinates by
// isotonic regression. Edges that skip layers run over joints, beside boxes and not under them.
//
// Source: Sugiyama, Tagawa & Toda, IEEE SMC 11(2), 1981.

const GAP = 16, LAYER = 46, PAD = 16, TITLE = 24, JOINT = 8, ROW_GAP = 14

// The non-decreasing sequence nearest to `values` in weighted squares ("pool adjacent violators").
function isotonic(values, weights) {
  const blocks = []
  values.forEach((value, i) => {
    let block = [value, weights[i], 1]
    while (blocks.length && blocks[blocks.length - 1][0] > block[0]) {
      const [mean, mass, length] = blocks.pop()
      const sum = mass + block[1]
      block = [(mean * mass + block[0] * block[1]) / sum, sum, length + block[2]]
    }
    blocks.push(block)
  })
  return blocks.flatMap(([mean, , length]) => Array(length).fill(mean))
}

// Which edges of a frame point down: those that follow the items' order (the data's way), and those
// of items that read nothing.
function downward(pairs) {
  const reads = new Set(pairs.map(([, b]) => b))
  return ([a, b]) => a < b || !reads.has(a)
}

// Longest path along the edges that point down, and against the others where they are alone; what
// reads nothing moves down to its first reader.
function layersOf(items, edges) {
  const level = items.map(() => 0), down = items.map(() => []), inputs = items.map(() => 0)
  const isDown = downward([...edges.values()])
  for (const [a, b] of edges.values()) {
    const [from, to] = isDown([a, b]) ? [a, b] : [b, a]
    if (from === b && edges.has(`${b},${a}`)) continue
    down[from].push(to)
    inputs[to]++
    if (from > to) level[to] = 1  // below what reads nothing, which is at 0
  }
  items.forEach((_, i) => { for (const to of down[i]) level[to] = Math.max(level[to], level[i] + 1) })
  for (let i = items.length - 1; i >= 0; i--)
    if (down[i].length && inputs[i] < down[i].length)
      level[i] = Math.max(level[i], Math.min(...down[i].map(to => level[to])) - 1)
  return level
}

// items: {w, h, lane}; edges: pairs of positions in items; ports: "top 3" and "bottom 3" where edges
// of item 3 leave the frame. Returns {w, h}, gives items x, y (upper left corner), and paths: "a,b" →
// points between the two, "top 3" → points from item 3 to the edge of the frame.
function layered(items, pairs, ports = []) {
  const edges = new Map(pairs.map(pair => [String(pair), pair]))
  const level = layersOf(items, edges)
  const cells = items.map((item, i) => ({
    i, w: item.w, h: item.h, level: level[i], up: [], down: [], lane: item.lane, weight: 1,
  }))
  const link = (a, b) => { cells[a].down.push(b); cells[b].up.push(a) }
  const chains = new Map()
  let budget = 40 * items.length + 400
  const joint = (shared, l, from) => {
    if (shared.has(l)) return
    budget--
    cells.push({
      i: -1, w: JOINT, h: 0, level: l, up: [], down: [], lane: cells[from].lane, weight: 6,
    })
    shared.set(l, cells.length - 1)
    return true
  }
  const sharedBy = name => {
    if (!chains.has(name)) chains.set(name, new Map())
    return chains.get(name)
  }
  for (const [key, [a, b]] of edges) {
    const [from, to] = level[a] <= level[b] ? [a, b] : [b, a]
    const span = level[to] - level[from] - 1
    if (span < 0) continue
    if (span === 0 || span > budget) { link(from, to); chains.set(key, []); continue }
    const shared = sharedBy(a === from ? `out ${a}` : `back ${a}`)
    let last = from
    const via = []
    for (let l = level[from] + 1; l < level[to]; l++) {
      if (joint(shared, l, from)) link(last, shared.get(l))
      via.push(last = shared.get(l))
    }
    link(last, to)
    chains.set(key, via)
  }
  const deepest = Math.max(0, ...level)
  for (const port of ports) {
    const [side, i] = port.split(" "), down = side === "bottom"
    const count = down ? deepest - level[i] : level[i]
    if (count > budget) continue
    const shared = sharedBy(down ? `out ${i}` : `back ${i}`)
    let last = +i
    const via = []
    for (let k = 1; k <= count; k++) {
      const l = level[i] + (down ? k : -k)
      if (joint(shared, l, i)) down ? link(last, shared.get(l)) : link(shared.get(l), last)
      via.push(last = shared.get(l))
    }
    chains.set(port, via)
  }
  const layers = []
  cells.forEach(cell => (layers[cell.level] ??= []).push(cell))
  for (let l = 0; l < layers.length; l++) layers[l] ??= []
  order(layers, cells)
  const rows = wrap(layers)
  coordinates(layers, cells, rows)
  return stacked(items, layers, cells, rows, chains, edges, ports)
}

function order(layers, cells) {
  for (const layer of layers) {
    layer.sort((a, b) => a.lane - b.lane || a.i - b.i)
    layer.forEach((cell, rank) => { cell.at = (rank + 0.5) / layer.length })
  }
  for (let sweep = 0; sweep < 12; sweep++) {
    const turn = sweep % 2 ? [...layers].reverse() : layers
    for (const layer of turn) {
      for (const cell of layer) {
        const near = sweep % 2 ? cell.down : cell.up
        cell.wish = near.length
          ? near.reduce((sum, other) => sum + cells[other].at, 0) / near.length : cell.at
      }
      layer.sort((a, b) => a.wish - b.wish || a.at - b.at)
      layer.forEach((cell, rank) => { cell.at = (rank + 0.5) / layer.length })
    }
  }
}

const widthOf = layer => layer.reduce((sum, cell) => sum + cell.w + GAP, -GAP)

// Wide layers wrap into rows, so that the frame is not flat.
function wrap(layers) {
  const boxes = layers.map(layer => layer.filter(cell => cell.i >= 0))
  const area = boxes.flat().reduce((sum, c) => sum + (c.w + GAP) * (c.h + LAYER), 0)
  const limit = Math.max(2.3 * Math.sqrt(area), ...boxes.flat().map(cell => cell.w), 460)
  return layers.map((layer, l) => widthOf(boxes[l]) > limit * 1.15
    ? Math.min(boxes[l].length, Math.ceil(widthOf(boxes[l]) / limit)) : 1)
}

// How far each cell of a layer lies from its first, at least. In several rows each box goes into
// the row that ends first: boxes of different rows may lie over each other's width, those of a row,
// which may be of any widths, may not.
function offsetsOf(layer, rows) {
  const ends = Array(rows).fill(-Infinity)
  let at = 0
  return layer.map((cell, rank) => {
    if (rank) {
      const before = layer[rank - 1], thin = (cell.i < 0) + (before.i < 0)
      at += ((cell.w + before.w) / 2 + [GAP, GAP * 0.7, GAP / 3][thin]) / rows
    }
    if (cell.i >= 0) {
      cell.row = ends.indexOf(Math.min(...ends))
      at = Math.max(at, ends[cell.row] + GAP + cell.w / 2)
      ends[cell.row] = at + cell.w / 2
    }
    return at
  })
}

function coordinates(layers, cells, rows) {
  const offsets = layers.map((layer, l) => offsetsOf(layer, rows[l]))
  layers.forEach((layer, l) => {
    const half = (offsets[l][layer.length - 1] ?? 0) / 2
    layer.forEach((cell, rank) => { cell.x = offsets[l][rank] - half })
  })
  const settle = (l, side) => {
    const layer = layers[l]
    const wish = layer.map((cell, rank) => {
      const near = side === "both" ? [...cell.up, ...cell.down] : cell[side]
      const mean = near.length
        ? near.reduce((sum, other) => sum + cells[other].x, 0) / near.length : cell.x
      return mean - offsets[l][rank]
    })
    isotonic(wish, layer.map(cell => cell.weight)).forEach((at, rank) => {
      layer[rank].x = at + offsets[l][rank]
    })
  }
  for (let sweep = 0; sweep < 10; sweep++) {
    const side = sweep >= 5 ? "both" : sweep % 2 ? "up" : "down"
    if (side === "down") for (let l = layers.length - 1; l >= 0; l--) settle(l, side)
    else for (let l = 0; l < layers.length; l++) settle(l, side)
  }
}

// Heights of the layers; a frame that is deep and narrow continues in further columns.
function stacked(items, layers, cells, rows, chains, edges, ports) {
  const heights = layers.map((layer, l) => {
    const boxes = layer.filter(cell => cell.i >= 0)
    const lines = Array(rows[l]).fill(0)
    for (const cell of boxes) lines[cell.row] = Math.max(lines[cell.row], cell.h)
    layer.lines = lines
    layer.tops = lines.map((_, k) => lines.slice(0, k).reduce((sum, h) => sum + h + ROW_GAP, 0))
    return lines.reduce((sum, h) => sum + h + ROW_GAP, -ROW_GAP)
  })
  // Where the layers have come to lie, which may be far from 0.
  const left = cells.length ? Math.min(...cells.map(c => c.x - c.w / 2)) : 0
  const wide = Math.max(left + 1, ...cells.map(c => c.x + c.w / 2)) - left
  const total = heights.reduce((sum, h) => sum + h + LAYER, -LAYER)
  let columns = 1
  while (total / columns > 1.6 * (wide + 40) * columns && columns < layers.length) columns++
  const column = [], tops = []
  let at = 0, done = 0, high = 0
  heights.forEach((h, l) => {
    let c = Math.min(columns - 1, Math.floor((done + h / 2) / (total / columns)))
    if (l && c !== column[l - 1]) at = 0, c = column[l - 1] + 1
    column.push(c)
    tops.push(at)
    high = Math.max(high, at + h)
    at += h + LAYER
    done += h + LAYER
  })
  const step = wide + 48, used = (column[column.length - 1] ?? 0) + 1
  layers.forEach((layer, l) => {
    for (const cell of layer) {
      cell.x += -left + column[l] * step
      cell.y = tops[l]
      if (cell.i < 0) continue
      cell.y += rows[l] === 1 ? (heights[l] - cell.h) / 2 : layer.tops[cell.row]
    }
  })
  items.forEach((item, i) => {
    item.x = cells[i].x - cells[i].w / 2
    item.y = cells[i].y
    item.column = column[cells[i].level]
  })
  // Downwards at x through rows of a layer, beside their boxes.
  const across = (l, x, first = 0, last = rows[l] - 1) => {
    const points = []
    for (let row = first; row <= last; row++) {
      const inWay = rows[l] === 1 ? undefined : layers[l].find(
        cell => cell.row === row && Math.abs(cell.x - x) < (cell.w + GAP) / 2)
      if (inWay) x = inWay.x + Math.sign(x - inWay.x || 1) * (inWay.w + GAP) / 2
      const y = tops[l] + (rows[l] === 1 ? 0 : layers[l].tops[row])
      points.push([x, y], [x, y + (rows[l] === 1 ? heights[l] : layers[l].lines[row])])
    }
    return points
  }
  // From an item down, or from above down to it, to where its edges may turn aside.
  const beyond = (i, down) => {
    const {x, y, h, level, row} = cells[i], end = tops[level] + (down ? heights[level] : 0)
    if (rows[level] > 1) return down ? [[x, y + h], ...across(level, x, row + 1)]
      : [...across(level, x, 0, row - 1), [x, y]]
    return end === (down ? y + h : y) ? [] : [[x, end]]
  }
  const paths = new Map()
  for (const port of ports) {
    const [side, i] = port.split(" "), down = side === "bottom"
    const points = down ? beyond(i, true) : beyond(i, false).reverse()
    for (const at of chains.get(port) ?? []) {
      const {x, level} = cells[at], ends = across(level, x)
      if (column[level] !== column[cells[i].level]) break
      points.push(...(down ? ends : ends.reverse()))
    }
    points.push([points.length ? points[points.length - 1][0] : cells[i].x, down ? high : 0])
    paths.set(port, points)
  }
  for (const [key, [a, b]] of edges) {
    const [upper, lower] = cells[a].level <= cells[b].level ? [a, b] : [b, a]
    const apart = cells[a].level !== cells[b].level
    const points = apart ? beyond(upper, true) : []
    const via = chains.get(key) ?? []
    const forward = cells[a].level <= cells[b].level
    let last = column[cells[forward ? a : b].level]
    for (const joint of [...via, forward ? b : a]) {
      const cell = cells[joint], c = column[cell.level]
      if (c !== last) {  // to the next column: down, up the gap between them, and down again
        const gap = c * step - 24
        points.push([gap, high + 10], [gap, -10])
      }
      last = c
      if (cell.i < 0) points.push(...across(cell.level, cell.x))
    }
    if (apart) points.push(...beyond(lower, false))
    paths.set(key, forward ? points : points.reverse())
  }
  return {w: wide + (used - 1) * step, h: high, paths}
}

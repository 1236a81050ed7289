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

// Longest path along the edges that follow the items' order (the data's way); what reads nothing
// moves down to its first reader.
function layersOf(items, edges) {
  const level = items.map(() => 0), down = items.map(() => []), inputs = items.map(() => 0)
  for (const [a, b] of edges.values()) {
    const [from, to] = a < b ? [a, b] : [b, a]
    if (a < b || !edges.has(`${to},${from}`)) down[from].push(to), inputs[to]++
  }
  items.forEach((_, i) => { for (const to of down[i]) level[to] = Math.max(level[to], level[i] + 1) })
  for (let i = items.length - 1; i >= 0; i--)
    if (down[i].length && inputs[i] < down[i].length)
      level[i] = Math.max(level[i], Math.min(...down[i].map(to => level[to])) - 1)
  return level
}

// items: {w, h, lane}; edges: pairs of positions in items. Returns {w, h}, gives items x, y (upper
// left corner), and paths: "a,b" → points between the two.
function layered(items, pairs) {
  const edges = new Map(pairs.map(pair => [String(pair), pair]))
  const level = layersOf(items, edges)
  const cells = items.map((item, i) => ({
    i, w: item.w, h: item.h, level: level[i], up: [], down: [], lane: item.lane, weight: 1,
  }))
  const link = (a, b) => { cells[a].down.push(b); cells[b].up.push(a) }
  const chains = new Map()
  let budget = 40 * items.length + 400
  for (const [key, [a, b]] of edges) {
    const [from, to] = level[a] <= level[b] ? [a, b] : [b, a]
    const span = level[to] - level[from] - 1
    if (span < 0) continue
    if (span === 0 || span > budget) { link(from, to); chains.set(key, []); continue }
    const name = a === from ? `out ${a}` : `back ${a}`
    const shared = chains.get(name) ?? new Map()
    chains.set(name, shared)
    let last = from
    const via = []
    for (let l = level[from] + 1; l < level[to]; l++) {
      if (!shared.has(l)) {
        budget--
        cells.push({
          i: -1, w: JOINT, h: 0, level: l, up: [], down: [], lane: cells[from].lane, weight: 6,
        })
        shared.set(l, cells.length - 1)
        link(last, cells.length - 1)
      }
      via.push(last = shared.get(l))
    }
    link(last, to)
    chains.set(key, via)
  }
  const layers = []
  cells.forEach(cell => (layers[cell.level] ??= []).push(cell))
  for (let l = 0; l < layers.length; l++) layers[l] ??= []
  order(layers, cells)
  const rows = wrap(layers)
  coordinates(layers, cells, rows)
  return stacked(items, layers, cells, rows, chains, edges)
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
function stacked(items, layers, cells, rows, chains, edges) {
  const heights = layers.map((layer, l) => {
    const boxes = layer.filter(cell => cell.i >= 0)
    const lines = Array(rows[l]).fill(0)
    for (const cell of boxes) lines[cell.row] = Math.max(lines[cell.row], cell.h)
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
  const paths = new Map()
  for (const [key, [a, b]] of edges) {
    const points = []
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
      if (cell.i < 0) points.push([cell.x, cell.y], [cell.x, cell.y + heights[cell.level]])
    }
    paths.set(key, forward ? points : points.reverse())
  }
  return {w: wide + (used - 1) * step, h: high, paths}
}

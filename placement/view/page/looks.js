// How things look, whatever is shown: numbers as text, texts that fit, colours.

const PIXELS = {label: 11.5, detail: 9.6, title: 11.5}  // sizes of the graph's texts at scale 1
const $ = id => document.getElementById(id)
const model = name => Bokeh.documents.map(d => d.get_model_by_name(name)).find(m => m)

// Numbers as text ---------------------------------------------------------------------------------

const three = v => Math.abs(v) >= 99.95 ? v.toFixed(0) : String(+v.toPrecision(3))
function seconds(v) {
  for (const [unit, name] of [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]])
    if (v >= unit) return `${three(v / unit)} ${name}`
  return v ? `${three(v / 1e-9)} ns` : "0 s"
}
// A time with its interval, in the unit of the time: 1.3 ms (1.1 to 1.6).
function interval(v, low, high) {
  if (low < 0) return seconds(v)
  const unit = [1, 1e-3, 1e-6, 1e-9].find(unit => v >= unit) ?? 1e-9
  return `${seconds(v)} (${three(low / unit)} to ${three(high / unit)})`
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

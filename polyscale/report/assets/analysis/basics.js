// Elements, numbers, colours, the tooltip, and saving. Text from the data only ever becomes text
// nodes and attribute values, never markup.

// Taken from the page, so that the file holds no address at all.
const SVG = document.getElementById("seed").namespaceURI;

function fill(node, attributes, children = []) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") node.addEventListener(name, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}
const html = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS(SVG, tag), attributes, children);
const text = (x, y, content, attributes = {}) =>
  svg("text", { x, y, fill: "var(--soft)", "font-size": 12, ...attributes }, content);
const rule = (x1, y1, x2, y2, stroke = "var(--grid)", attributes = {}) =>
  svg("line", { x1, y1, x2, y2, stroke, ...attributes });
const rect = (x, y, width, height, attributes) => svg("rect", { x, y, width, height, ...attributes });
const button = (label, click, attributes = {}) =>
  html("button", { type: "button", click, ...attributes }, label);
const select = (options, attributes) =>
  html(
    "select",
    attributes,
    options.map(([value, label]) => html("option", { value }, label)),
  );
const labelled = (label, control, attributes = {}) => html("label", attributes, label, control);
const ARROWS = { ArrowUp: [-1, 0], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowRight: [0, 1] };
const stepOf = (event) => (ARROWS[event.key] ?? [0, 0]).reduce((sum, part) => sum + part);

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
const largest = (values) => values.reduce((top, v) => (isNumber(v) && v > top ? v : top), -Infinity);
const smallest = (values) => values.reduce((low, v) => (isNumber(v) && v < low ? v : low), Infinity);
const unique = (values) => [...new Set(values)];

function number(value, digits = 3) {
  if (!isNumber(value)) return "n/a";
  const size = Math.abs(value);
  if (size !== 0 && size < 1e-12) return "≈ 0"; // what rounding leaves of a zero
  if (size !== 0 && (size >= 1e5 || size < 1e-3)) return value.toExponential(digits - 1);
  return String(Number(value.toPrecision(digits)));
}
const percent = (value) => (isNumber(value) ? `${number(100 * value)} %` : "n/a");
const compact = (value) =>
  isNumber(value)
    ? new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 }).format(value)
    : "n/a";
const short = (words, length) => {
  const letters = [...words];
  return letters.length > length ? `${letters.slice(0, length - 1).join("")}…` : words;
};

// Control characters become pictures of themselves, so that every token can be seen.
const visible = (token) =>
  String(token)
    .replace(
      /[\u0000-\u0020]/g,
      (c) => ({ " ": "␣", "\n": "↵", "\t": "⇥" })[c] ?? String.fromCharCode(0x2400 + c.charCodeAt(0)),
    )
    .replace(/[\u007f-\u009f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufffe\uffff]/g, "�");
const quote = (token) => `“\u2068${visible(token)}\u2069”`; // isolated: right-to-left text stays in

const colours = new Map(); // of the style sheet; emptied when the theme changes
function colour(name) {
  if (!colours.has(name))
    colours.set(name, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  return colours.get(name);
}
const levelColour = (level) => `var(--level-${level % 7})`;
const channels = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
function readable(red, green, blue) {
  return 0.299 * red + 0.587 * green + 0.114 * blue > 140 ? "#10141a" : "#ffffff";
}
// From a share between 0 and 1 to [red, green, blue], along the named colours of the style sheet.
const STOPS = { heat: 4, split: 5 };
function ramp(name) {
  const count = STOPS[name];
  const stops = Array.from({ length: count }, (_, index) => channels(colour(`--${name}-${index}`)));
  return (share) => {
    const place = clamp(share, 0, 1) * (count - 1);
    const start = Math.min(Math.floor(place), count - 2);
    return stops[start].map((low, i) => Math.round(low + (stops[start + 1][i] - low) * (place - start)));
  };
}

const tip = document.getElementById("tip");
function showTip(words, x, y) {
  if (tip.textContent !== words) tip.textContent = words;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = clamp(x + 14, 4, window.innerWidth - box.width - 4);
  const above = y - box.height - 12;
  tip.style.transform = `translate(${left}px, ${above < 4 ? y + 18 : above}px)`;
}
const hideTip = () => {
  tip.hidden = true;
};
function tipAtMark(mark) {
  const box = mark.getBoundingClientRect();
  showTip(mark.dataset.tip, box.x + box.width / 2, box.y);
}

// Marks with data-tip show it under the pointer; in a drawing that has the focus the arrow keys go
// from mark to mark, and Enter acts as a click.
document.addEventListener("pointerover", (event) => {
  const mark = event.target.closest?.("[data-tip]");
  if (mark) showTip(mark.dataset.tip, event.clientX, event.clientY);
  else if (!event.target.closest?.("[data-cells]")) hideTip();
});
document.addEventListener("scroll", hideTip, { passive: true });
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") hideTip();
  const drawing = event.target.closest?.(".plot > svg:not([data-cells])");
  if (!drawing) return;
  const marks = [...drawing.querySelectorAll("[data-tip]")];
  const at = marks.findIndex((mark) => mark.classList.contains("current"));
  if (event.key === "Enter" && at >= 0) marks[at].dispatchEvent(new MouseEvent("click", { bubbles: true }));
  const step = stepOf(event);
  if (!step || !marks.length) return;
  event.preventDefault();
  marks[at]?.classList.remove("current");
  const next = marks[at < 0 ? 0 : (at + step + marks.length) % marks.length];
  next.classList.add("current");
  tipAtMark(next);
});

function download(content, type, name) {
  const address = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type }));
  html("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

// The drawing as a file of its own: colours resolved, tips as titles, on the colour of its card.
function standalone(drawing) {
  const copy = drawing.cloneNode(true);
  for (const mark of copy.querySelectorAll("[data-tip]")) {
    mark.append(svg("title", {}, mark.dataset.tip));
    mark.removeAttribute("data-tip");
  }
  copy.removeAttribute("tabindex");
  copy.prepend(rect(0, 0, "100%", "100%", { fill: "var(--card)" }));
  return new XMLSerializer()
    .serializeToString(copy)
    .replace(/var\((--[\w-]+)\)/g, (_, name) => colour(name))
    .replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f\ufffe\uffff]/g, "�")
    .toWellFormed();
}

function savePicture(drawing, name) {
  const picture = new Image();
  const { width, height } = drawing.viewBox.baseVal;
  picture.onload = () => {
    const canvas = html("canvas", { width: 2 * width, height: 2 * height });
    canvas.getContext("2d").drawImage(picture, 0, 0, 2 * width, 2 * height);
    canvas.toBlob((blob) => download(blob, "image/png", `${name}.png`));
  };
  picture.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(standalone(drawing))}`;
}

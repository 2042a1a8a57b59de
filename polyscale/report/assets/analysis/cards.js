// What all sections are made of: cards, tables, overviews, maps. All are redrawn on each choice.

const PLACE = ["layer", "head", "level"];
const matches = (entry, choice, keys = PLACE) =>
  keys.every((key) => (entry[key] ?? choice[key]) === choice[key]);
const ofHead = (list, whom = choice) => list.filter((entry) => matches(entry, whom, ["layer", "head"]));
let manyLevels = false; // where all is at one level, no title speaks of levels
const whose = (choice, keys = PLACE) =>
  keys
    .filter((key) => key !== "level" || manyLevels)
    .map((key) => NAMES[key](choice[key]))
    .join(", ");
const atLevel = (level) => (manyLevels ? `, ${levelName(level)}` : "");
const has = (list) => Array.isArray(list) && list.length > 0;
const part = (name) => data[name] ?? {};
const lines = (...words) => words.filter(Boolean).join("\n");
const levelPart = (level, value, form, ...above) => {
  const tip = lines(...above, `${levelName(level)}: ${form(value)}`);
  return { value, colour: levelColour(level), tip };
};

// A card with a title and buttons to save it. `draw(width)` returns an <svg>, or words where there
// is nothing to draw for this choice.
function figure(place, name, title, draw, { full = false, caption = "" } = {}) {
  const plot = html("div", { class: "plot" });
  const heading = html("span");
  const formats = {
    SVG: () => download(standalone(plot.firstChild), "image/svg+xml", `${name}.svg`),
    PNG: () => savePicture(plot.firstChild, name),
  };
  const saveAs = ([format, click]) => button(format, click, { "aria-label": `Save ${name} as ${format}` });
  const save = html("span", { class: "save" }, Object.entries(formats).map(saveAs));
  const card = html(
    "figure",
    { class: full && "full" },
    html("figcaption", {}, heading, save),
    plot,
    caption && html("p", { class: "caption" }, caption),
  );
  place.append(card);
  let width = 0;
  const redraw = () => {
    const words = typeof title === "function" ? title() : title;
    heading.textContent = words[0].toUpperCase() + words.slice(1);
    width = plot.clientWidth;
    const drawing = draw(Math.max(width, 240), heading.textContent);
    card.hidden = drawing === null;
    const empty = typeof drawing === "string";
    save.hidden = empty;
    plot.replaceChildren(empty ? html("p", { class: "note" }, drawing) : (drawing ?? ""));
  };
  new ResizeObserver(() => {
    if (plot.clientWidth && plot.clientWidth !== width) redraw();
  }).observe(plot);
  return listen(redraw);
}
const grid = (place) => place.appendChild(html("div", { class: "figures" }));

// columns: [[head, cell(entry)]], a cell being words or a node; list() gives the entries, and
// chosen(entry) says which of them to stress.
function table(place, title, columns, list, chosen = () => false) {
  const body = html("tbody");
  const heads = columns.map(([head]) => html("th", { scope: "col" }, head));
  const region = { class: "wide", tabindex: 0, role: "region", "aria-label": title };
  const whole = html("table", {}, html("thead", {}, html("tr", {}, heads)), body);
  const card = html("div", {}, html("h3", {}, title), html("div", region, whole));
  place.append(card);
  const row = (entry) => {
    const cells = columns.map(([, cell], at) => html("td", { class: at === 0 && "words" }, cell(entry)));
    return html("tr", { class: chosen(entry) && "chosen" }, cells);
  };
  listen(() => {
    const entries = list();
    card.hidden = entries.length === 0;
    body.replaceChildren(...entries.map(row));
  });
}

// The chosen level where the list has it, else the first it has: titles name what is shown.
const nearest = (list) => {
  const levels = unique(list.map((entry) => entry.level));
  return { ...choice, level: levels.includes(choice.level) || !has(levels) ? choice.level : levels[0] };
};

function noneFor(list, choice, what) {
  const here = ofHead(list, choice);
  const others = here.length
    ? here.map((entry) => levelName(entry.level))
    : list.map((entry) => whose(entry, ["layer", "head"]));
  return `No ${what} for ${whose(choice)}. There is one for ${unique(others).slice(0, 6).join("; ")}.`;
}

// Which positions of the example one of `count` cells covers: a cell of a map is one entry of its
// level, or several of `pooled` entries; an entry of a level is one position, or 2, 4, 8 ..
function strideOf(size) {
  let stride = 1;
  while (Math.ceil((data.meta.length ?? size) / stride) > size) stride *= 2;
  return stride;
}
function positions(index, count, pooled) {
  const size = pooled ?? count,
    stride = strideOf(size);
  const length = Math.max(data.meta.length ?? size, size);
  const [from, end] = [Math.floor((index * size) / count), Math.ceil(((index + 1) * size) / count)];
  return [from * stride, Math.min(end * stride, length) - 1];
}
function tokensOf(index, count, pooled) {
  const [from, to] = positions(index, count, pooled);
  return data.meta.tokens.slice(from, to + 1).join("");
}
function cellName(index, count, pooled) {
  const [from, to] = positions(index, count, pooled);
  const words = has(data.meta.tokens) ? ` ${quote(short(tokensOf(index, count, pooled), 40))}` : "";
  return `${from === to ? from : `${from}–${to}`}${words}`;
}
function drawMap(width, label, matrix, { pooled, ...options }) {
  const value = (row, column) => (matrix[row][column] === null ? "masked" : number(matrix[row][column], 4));
  return heatmap(width, label, {
    matrix,
    limit: extent([matrix], options.diverging),
    cell: (row, column) =>
      `query ${cellName(row, matrix.length, pooled)}\nkey ${cellName(column, matrix[0].length, pooled)}\n${value(row, column)}`,
    names: has(data.meta.tokens) && ((index, count) => tokensOf(index, count, pooled)),
    reach: (count) => (pooled ?? count) * strideOf(pooled ?? count),
    ...options,
  });
}

// A figure of what `list` holds for the chosen layer and head.
function headFigure(place, name, title, list, what, draw, options) {
  const heading = () => `${title}: ${whose(choice, ["layer", "head"])}`;
  const drawHead = (width, label) => {
    const here = ofHead(list);
    return here.length ? draw(width, label, here) : noneFor(list, choice, what);
  };
  return figure(place, name, heading, drawHead, options);
}

// One value for each head of each layer. `describe(entry)` gives {value, tip, text}; `level()` is the
// level to show where the entries belong to levels.
function overview(place, name, title, list, what, describe, { level, ...options } = {}) {
  const heading = () => title + (level ? atLevel(level()) : "");
  const draw = (width, label) => {
    const here = level ? list.filter((entry) => matches(entry, { level: level() }, ["level"])) : list;
    if (!here.length) return noneFor(list, choice, what);
    const cells = here.map((entry) => {
      const { tip: words, ...cell } = describe(entry);
      const tip = lines(whose(entry, ["layer", "head"]), ...words);
      return { ...entry, ...cell, chosen: matches(entry, choice, ["layer", "head"]), tip };
    });
    return gridChart(width, label, { form: options.form, cells });
  };
  return figure(place, name, heading, draw, options);
}

// Charts as SVG: each takes its width and what to show, and returns one <svg>.

const CENTRED = { "text-anchor": "middle" };

function canvasOf(width, height, label, ...children) {
  const size = { viewBox: `0 0 ${width} ${height}`, width, height };
  const role = { role: "img", tabindex: 0, "aria-label": label };
  return svg("svg", { ...size, ...role, "font-family": "system-ui, sans-serif" }, ...children);
}

// Names with colour swatches, in as many lines as the width needs.
function legend(items, width) {
  const group = svg("g");
  let x = 0,
    line = 0;
  for (const { name, colour: paint, dash } of items) {
    const space = 30 + 6.8 * name.length;
    if (x > 0 && x + space > width) {
      x = 0;
      line += 1;
    }
    const y = 18 * line + 9;
    const stroke = { "stroke-width": dash === undefined ? 10 : 2.5, "stroke-dasharray": dash };
    group.append(rule(x + 1, y, x + 17, y, paint, stroke), text(x + 22, y + 4, name, { fill: "var(--ink)" }));
    x += space;
  }
  return { group, height: items.length ? 18 * (line + 1) + 6 : 0 };
}

function ticksOf(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
  const ticks = [];
  for (let tick = Math.ceil(low / step - 1e-9); tick * step <= high + step * 1e-9; tick += 1)
    ticks.push(tick * step || 0);
  return ticks;
}
function logTicksOf(low, high) {
  const [from, to] = [Math.log10(low), Math.log10(high)];
  const steps = to - from < 2.5 ? [1, 2, 5] : [1];
  const powers = Array.from({ length: Math.ceil(to - from) + 2 }, (_, at) => 10 ** (Math.floor(from) + at));
  let ticks = powers.flatMap((power) => steps.map((step) => step * power));
  ticks = ticks.filter((tick) => tick >= low && tick <= high);
  while (ticks.length > 8) ticks = ticks.filter((_, index) => index % 2 === 0);
  return ticks;
}

// A scale from values to pixels with its ticks; logarithmic scales take positive values only.
function scale(values, start, end, { log = false, zero = false, count = 5 } = {}) {
  const place = log ? Math.log10 : (value) => value;
  let low = smallest(values),
    high = largest(values);
  if (low > high) [low, high] = log ? [0.1, 1] : [0, 1];
  if (zero) [low, high] = [Math.min(low, 0), Math.max(high, 0)];
  if (log) [low, high] = [low / 1.3, high * 1.3];
  else if (low === high) [low, high] = [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
  const [from, to] = [place(low), place(high)];
  const scaled = (value) => start + ((place(value) - from) / (to - from)) * (end - start);
  return Object.assign(scaled, { ticks: log ? logTicksOf(low, high) : ticksOf(low, high, count), low, high });
}

// rows: [{label, parts: [{value, colour, tip}], mark, pick, chosen}]; negative parts go left.
function barChart(width, label, { rows, names = [], axis = "", form = number, whole = false }) {
  const left = Math.min(130, 14 + 6.6 * largest(rows.map((row) => row.label.length)));
  const key = legend(names, width);
  const sum = (parts, sign) => parts.reduce((all, { value }) => all + (sign * value > 0 ? value : 0), 0);
  const ends = rows.flatMap(({ parts, mark }) => [sum(parts, 1), sum(parts, -1), mark]);
  const x = scale(whole ? [0, 1] : ends, left, width - 24, { zero: true, count: width < 400 ? 4 : 6 });
  const [top, bottom] = [key.height, key.height + 26 * rows.length + 4];
  const drawing = canvasOf(width, bottom + (axis ? 40 : 22), label, key.group);
  for (const tick of x.ticks)
    drawing.append(rule(x(tick), top, x(tick), bottom), text(x(tick), bottom + 16, form(tick), CENTRED));
  rows.forEach((row, index) => {
    const y = top + 26 * index + 4;
    const pick = row.pick && JSON.stringify(row.pick);
    const weight = row.chosen && 700;
    const style = { "text-anchor": "end", "data-pick": pick, fill: "var(--ink)", "font-weight": weight };
    drawing.append(text(left - 6, y + 14, row.label, style));
    const reached = { up: 0, down: 0 };
    for (const { value, colour: paint, tip } of row.parts.filter((part) => isNumber(part.value))) {
      const side = value >= 0 ? "up" : "down";
      const [x1, x2] = [reached[side], (reached[side] += value)].map(x).sort((a, b) => a - b);
      drawing.append(
        rect(x1, y, Math.max(x2 - x1, 0.5), 20, { fill: paint, "data-tip": tip, "data-pick": pick }),
      );
      const covered = isNumber(row.mark) && Math.abs(x(row.mark) - (x1 + x2) / 2) < 22;
      if (x2 - x1 <= 38 || covered) continue;
      const inside = { fill: readable(...channels(colour(paint.slice(4, -1)))), "pointer-events": "none" };
      drawing.append(text((x1 + x2) / 2, y + 14, form(value), { ...CENTRED, "font-size": 11, ...inside }));
    }
    if (isNumber(row.mark))
      drawing.append(rule(x(row.mark), y - 3, x(row.mark), y + 23, "var(--ink)", { "stroke-width": 2.5 }));
  });
  if (x.low < 0) drawing.append(rule(x(0), top, x(0), bottom, "var(--soft)"));
  drawing.append(text(Math.min((left + width) / 2, width - 3.3 * axis.length), bottom + 34, axis, CENTRED));
  return drawing;
}

// series: [{name, colour, dash, dots, line, points: [[x, y]], tip(x, y), paint(x, y)}].
function lineChart(
  width,
  label,
  { series, across = "", up = "", log = false, zero = false, diagonal = false, whole = false },
) {
  const drawable = ([x, y]) => isNumber(x) && isNumber(y) && (!log || y > 0);
  const shown = series.map((one) => ({ ...one, points: one.points.filter(drawable) }));
  const named = shown.filter(({ name }) => name);
  const key = legend(named, width);
  const [left, top, bottom] = [58, key.height + 18, key.height + 228];
  const points = shown.flatMap((one) => one.points);
  const [xs, ys] = [0, 1].map((axis) => points.map((point) => point[axis]));
  const x = scale(xs, left + 8, width - 14, { count: width < 400 ? 4 : 7 });
  const y = scale(diagonal ? [...ys, ...xs] : ys, bottom, top + 4, { log, zero });
  const drawing = canvasOf(width, bottom + 42, label, key.group, text(0, key.height + 10, up));
  for (const tick of y.ticks)
    drawing.append(
      rule(left, y(tick), width - 6, y(tick), tick === 0 ? "var(--soft)" : "var(--grid)"),
      text(left - 6, y(tick) + 4, number(tick), { "text-anchor": "end" }),
    );
  for (const tick of x.ticks.filter((tick) => !whole || Number.isInteger(tick)))
    drawing.append(text(x(tick), bottom + 18, number(tick), CENTRED));
  drawing.append(text((left + width) / 2, bottom + 36, across, CENTRED));
  if (diagonal && points.length) {
    const [from, to] = [Math.max(x.low, y.low), Math.min(x.high, y.high)];
    drawing.append(rule(x(from), y(from), x(to), y(to), "var(--soft)", { "stroke-dasharray": "4 3" }));
  }
  for (const one of shown) {
    const path = one.points.map(([a, b]) => `${x(a)},${y(b)}`).join(" ");
    const stroke = { stroke: one.colour, "stroke-width": 2, "stroke-dasharray": one.dash };
    if (one.line !== false) drawing.append(svg("polyline", { points: path, fill: "none", ...stroke }));
    for (const [a, b] of one.points) {
      const paint = one.paint ? one.paint(a, b) : one.colour;
      drawing.append(svg("circle", { cx: x(a), cy: y(b), r: 3.5, fill: paint, "data-tip": one.tip(a, b) }));
    }
  }
  return drawing;
}

// Layers down, heads across, one value each: where to look first.
function gridChart(width, label, { cells, form = number }) {
  const layers = unique(cells.map((cell) => cell.layer)).sort((a, b) => a - b);
  const heads = unique(cells.map((cell) => cell.head ?? 0)).sort((a, b) => a - b);
  const left = 60,
    side = Math.min((width - left - 4) / heads.length, 90),
    tall = clamp(side, 22, 34);
  const limit = largest(cells.map((cell) => cell.value)) || 1;
  const paint = ramp("heat");
  const drawing = canvasOf(width, 22 + tall * layers.length + 4, label);
  heads.forEach((head, index) =>
    drawing.append(text(left + side * (index + 0.5), 14, side > 52 ? headName(head) : head, CENTRED)),
  );
  layers.forEach((layer, index) =>
    drawing.append(text(left - 8, 22 + tall * (index + 0.5) + 4, layerName(layer), { "text-anchor": "end" })),
  );
  for (const cell of cells) {
    const known = isNumber(cell.value);
    const shade = paint(known ? cell.value / limit : 0);
    const x = left + side * heads.indexOf(cell.head ?? 0),
      y = 22 + tall * layers.indexOf(cell.layer);
    drawing.append(
      rect(x + 1, y + 1, side - 2, tall - 2, {
        rx: 3,
        fill: known ? `rgb(${shade})` : "var(--masked)",
        stroke: cell.chosen ? "var(--focus)" : "var(--grid)",
        "stroke-width": cell.chosen ? 2 : 1,
        "data-tip": cell.tip,
        "data-pick": JSON.stringify({ layer: cell.layer, head: cell.head }),
      }),
    );
    if (side <= 34) continue;
    const style = {
      "font-size": 11,
      fill: known ? readable(...shade) : "var(--ink)",
      "pointer-events": "none",
    };
    drawing.append(
      text(x + side / 2, y + tall / 2 + 4, cell.text ?? form(cell.value), { ...CENTRED, ...style }),
    );
  }
  return drawing;
}

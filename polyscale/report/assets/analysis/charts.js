// Charts as SVG: each takes the width it has and what to show, and returns one <svg>.

function canvasOf(width, height, label, ...children) {
  return svg(
    "svg",
    {
      viewBox: `0 0 ${width} ${height}`,
      width,
      height,
      role: "img",
      tabindex: 0,
      "aria-label": label,
      "font-family": "system-ui, sans-serif",
    },
    ...children,
  );
}

// Names with colour swatches, in as many lines as the width asks for.
function legend(items, width, top) {
  const group = svg("g");
  let x = 0,
    line = 0;
  for (const { name, colour: paint, dash } of items) {
    const space = 30 + 6.8 * name.length;
    if (x > 0 && x + space > width) {
      x = 0;
      line += 1;
    }
    const y = top + 18 * line + 9;
    group.append(
      svg("line", {
        x1: x + 1,
        x2: x + 17,
        y1: y,
        y2: y,
        stroke: paint,
        "stroke-width": dash === undefined ? 10 : 2.5,
        "stroke-dasharray": dash,
      }),
      text(x + 22, y + 4, name, { fill: "var(--ink)" }),
    );
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

// A scale from values to pixels with its ticks; logarithmic scales take positive values only.
function scale(values, start, end, { log = false, zero = false, count = 5 } = {}) {
  const place = log ? Math.log10 : (value) => value;
  let low = smallest(values),
    high = largest(values);
  if (low > high) [low, high] = log ? [0.1, 1] : [0, 1];
  if (zero) {
    low = Math.min(low, 0);
    high = Math.max(high, 0);
  }
  if (log) [low, high] = [low / 1.3, high * 1.3];
  if (low === high)
    [low, high] = log
      ? [low / 10, high * 10]
      : [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
  const [from, to] = [place(low), place(high)];
  let ticks = ticksOf(from, to, count);
  if (log) {
    const steps = to - from < 2.5 ? [1, 2, 5] : [1];
    const powers = Array.from(
      { length: Math.ceil(to - from) + 2 },
      (_, index) => 10 ** (Math.floor(from) + index),
    );
    ticks = powers
      .flatMap((power) => steps.map((step) => step * power))
      .filter((tick) => tick >= low && tick <= high);
    while (ticks.length > 8) ticks = ticks.filter((_, index) => index % 2 === 0);
  }
  const scaled = (value) => start + ((place(value) - from) / (to - from)) * (end - start);
  return Object.assign(scaled, { ticks, low, high });
}

// rows: [{label, parts: [{value, colour, tip}], mark, pick, chosen}]; negative parts go left.
function barChart(width, label, { rows, names = [], axis = "", form = number, whole = false }) {
  const left = Math.min(130, 14 + 6.6 * largest(rows.map((row) => row.label.length)));
  const key = legend(names, width, 0);
  const ends = rows.flatMap(({ parts, mark }) => [
    parts.reduce((sum, { value }) => sum + (value > 0 ? value : 0), 0),
    parts.reduce((sum, { value }) => sum + (value < 0 ? value : 0), 0),
    mark,
  ]);
  const x = scale(whole ? [0, 1] : ends, left, width - 24, { zero: true, count: width < 400 ? 4 : 6 });
  const bottom = key.height + 26 * rows.length + 4;
  const drawing = canvasOf(width, bottom + (axis ? 40 : 22), label, key.group);
  for (const tick of x.ticks) {
    drawing.append(
      svg("line", { x1: x(tick), x2: x(tick), y1: key.height, y2: bottom, stroke: "var(--grid)" }),
      text(x(tick), bottom + 16, form(tick), { "text-anchor": "middle" }),
    );
  }
  rows.forEach((row, index) => {
    const y = key.height + 26 * index + 4;
    const pick = row.pick && JSON.stringify(row.pick);
    drawing.append(
      text(left - 6, y + 14, row.label, {
        "text-anchor": "end",
        "data-pick": pick,
        fill: "var(--ink)",
        "font-weight": row.chosen && 700,
      }),
    );
    let up = 0,
      down = 0;
    for (const part of row.parts.filter(({ value }) => isNumber(value))) {
      const from = part.value >= 0 ? up : down + part.value;
      if (part.value >= 0) up += part.value;
      else down += part.value;
      const [x1, x2] = [x(from), x(from + Math.abs(part.value))];
      drawing.append(
        svg("rect", {
          x: x1,
          y,
          width: Math.max(x2 - x1, 0.5),
          height: 20,
          fill: part.colour,
          "data-tip": part.tip,
          "data-pick": pick,
        }),
      );
      const covered = isNumber(row.mark) && Math.abs(x(row.mark) - (x1 + x2) / 2) < 22;
      if (x2 - x1 > 38 && !covered) {
        const ground = part.colour.startsWith("var") ? colour(part.colour.slice(4, -1)) : part.colour;
        drawing.append(
          text((x1 + x2) / 2, y + 14, form(part.value), {
            "text-anchor": "middle",
            "font-size": 11,
            fill: readable(...channels(ground)),
            "pointer-events": "none",
          }),
        );
      }
    }
    if (isNumber(row.mark))
      drawing.append(
        svg("line", {
          x1: x(row.mark),
          x2: x(row.mark),
          y1: y - 3,
          y2: y + 23,
          stroke: "var(--ink)",
          "stroke-width": 2.5,
        }),
      );
  });
  if (x.low < 0)
    drawing.append(svg("line", { x1: x(0), x2: x(0), y1: key.height, y2: bottom, stroke: "var(--soft)" }));
  drawing.append(
    text(Math.min((left + width) / 2, width - 3.3 * axis.length), bottom + 34, axis, {
      "text-anchor": "middle",
    }),
  );
  return drawing;
}

// series: [{name, colour, dash, dots, line, points: [[x, y]], tip(x, y), paint(x, y)}].
function lineChart(
  width,
  label,
  { series, across = "", up = "", log = false, zero = false, diagonal = false, whole = false },
) {
  const shown = series.map((one) => ({
    ...one,
    points: one.points.filter(([x, y]) => isNumber(x) && isNumber(y) && (!log || y > 0)),
  }));
  const key = legend(
    shown.filter(({ name }) => name),
    width,
    0,
  );
  const [left, top, height] = [58, key.height + 18, 210];
  const points = shown.flatMap((one) => one.points);
  const ys = points.map((point) => point[1]).concat(diagonal ? points.map((point) => point[0]) : []);
  const x = scale(
    points.map((point) => point[0]),
    left + 8,
    width - 14,
    { count: width < 400 ? 4 : 7 },
  );
  const y = scale(ys, top + height, top + 4, { log, zero });
  const drawing = canvasOf(width, top + height + 42, label, key.group, text(0, key.height + 10, up));
  for (const tick of y.ticks) {
    drawing.append(
      svg("line", {
        x1: left,
        x2: width - 6,
        y1: y(tick),
        y2: y(tick),
        stroke: tick === 0 ? "var(--soft)" : "var(--grid)",
      }),
      text(left - 6, y(tick) + 4, number(tick), { "text-anchor": "end" }),
    );
  }
  for (const tick of x.ticks.filter((tick) => !whole || Number.isInteger(tick))) {
    drawing.append(text(x(tick), top + height + 18, number(tick), { "text-anchor": "middle" }));
  }
  drawing.append(text((left + width) / 2, top + height + 36, across, { "text-anchor": "middle" }));
  if (diagonal && points.length) {
    const [from, to] = [Math.max(x.low, y.low), Math.min(x.high, y.high)];
    drawing.append(
      svg("line", {
        x1: x(from),
        y1: y(from),
        x2: x(to),
        y2: y(to),
        stroke: "var(--soft)",
        "stroke-dasharray": "4 3",
      }),
    );
  }
  for (const one of shown) {
    if (one.line !== false) {
      drawing.append(
        svg("polyline", {
          points: one.points.map(([a, b]) => `${x(a)},${y(b)}`).join(" "),
          fill: "none",
          stroke: one.colour,
          "stroke-width": 2,
          "stroke-dasharray": one.dash,
        }),
      );
    }
    for (const [a, b] of one.points) {
      drawing.append(
        svg("circle", {
          cx: x(a),
          cy: y(b),
          r: 3.5,
          fill: one.paint ? one.paint(a, b) : one.colour,
          "data-tip": one.tip(a, b),
        }),
      );
    }
  }
  return drawing;
}

// Layers down, heads across, one value each: where to look first.
function gridChart(width, label, { cells, form = number, diverging = false }) {
  const layers = unique(cells.map((cell) => cell.layer)).sort((a, b) => a - b);
  const heads = unique(cells.map((cell) => cell.head ?? 0)).sort((a, b) => a - b);
  const left = 60,
    side = Math.min((width - left - 4) / heads.length, 90),
    tall = clamp(side, 22, 34);
  const values = cells.map((cell) => cell.value);
  const limit = diverging ? Math.max(largest(values), -smallest(values)) || 1 : largest(values) || 1;
  const paint = diverging ? ramp("split", 5) : ramp("heat", 4);
  const drawing = canvasOf(width, 22 + tall * layers.length + 4, label);
  heads.forEach((head, index) =>
    drawing.append(
      text(left + side * (index + 0.5), 14, side > 52 ? headName(head) : head, { "text-anchor": "middle" }),
    ),
  );
  layers.forEach((layer, index) =>
    drawing.append(text(left - 8, 22 + tall * (index + 0.5) + 4, layerName(layer), { "text-anchor": "end" })),
  );
  for (const cell of cells) {
    const share = isNumber(cell.value) ? (diverging ? 0.5 + cell.value / limit / 2 : cell.value / limit) : 0;
    const shade = paint(share);
    const x = left + side * heads.indexOf(cell.head ?? 0),
      y = 22 + tall * layers.indexOf(cell.layer);
    drawing.append(
      svg("rect", {
        x: x + 1,
        y: y + 1,
        width: side - 2,
        height: tall - 2,
        rx: 3,
        fill: isNumber(cell.value) ? `rgb(${shade})` : "var(--masked)",
        stroke: cell.chosen ? "var(--focus)" : "var(--grid)",
        "stroke-width": cell.chosen ? 2 : 1,
        "data-tip": cell.tip,
        "data-pick": JSON.stringify({ layer: cell.layer, head: cell.head }),
      }),
    );
    if (side > 34)
      drawing.append(
        text(x + side / 2, y + tall / 2 + 4, cell.text ?? form(cell.value), {
          "text-anchor": "middle",
          "font-size": 11,
          fill: isNumber(cell.value) ? readable(...shade) : "var(--ink)",
          "pointer-events": "none",
        }),
      );
  }
  return drawing;
}

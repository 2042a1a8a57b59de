// Matrices as pictures: painted on a canvas, one pixel block per cell, and set into an SVG.

function extent(matrices, diverging) {
  let top = 0;
  for (const matrix of matrices)
    for (const row of matrix)
      for (const value of row) {
        const size = diverging ? Math.abs(value) : value;
        if (size > top) top = size;
      }
  return top || 1;
}

function paintCells(canvas, matrix, { limit, diverging = false, contrast = 1 }) {
  const [rows, columns] = [matrix.length, matrix[0].length];
  const shade = ramp(diverging ? "split" : "heat");
  const table = Array.from({ length: 256 }, (_, index) => shade(index / 255));
  const masked = channels(colour("--masked"));
  canvas.width = columns;
  canvas.height = rows;
  const pixels = new ImageData(columns, rows);
  matrix.forEach((row, i) =>
    row.forEach((value, j) => {
      let share = clamp(value / limit, -1, 1);
      share = Math.sign(share) * Math.abs(share) ** contrast;
      const place = Math.round(255 * (diverging ? 0.5 + share / 2 : share));
      pixels.data.set(isNumber(value) ? table[Math.max(place, 0)] : masked, 4 * (i * columns + j));
      pixels.data[4 * (i * columns + j) + 3] = 255;
    }),
  );
  canvas.getContext("2d").putImageData(pixels, 0, 0);
  return canvas;
}

// `cell(row, column)` describes a cell; `choose(row)` is called with the row under the pointer.
function heatmap(width, label, { matrix, limit, diverging, contrast, names, reach, cell, choose, range }) {
  const [rows, columns] = [matrix.length, matrix[0].length];
  const tokens = names && rows <= 26 && columns <= 26;
  const margin = tokens ? 70 : 44;
  const side = Math.min(width - margin - 8, 460);
  const tall = Math.max(Math.min(side * (rows / columns), 2 * side), 12);
  // Whole numbers of pixels per cell, and many of them, so that no viewer smooths the cells.
  const block = Math.ceil(512 / Math.max(rows, columns));
  const small = paintCells(html("canvas"), matrix, { limit, diverging, contrast });
  const big = html("canvas", { width: columns * block, height: rows * block });
  const context = big.getContext("2d");
  context.imageSmoothingEnabled = false;
  context.drawImage(small, 0, 0, big.width, big.height);
  const drawing = canvasOf(width, tall + (tokens ? 92 : 52), label);
  drawing.setAttribute("data-cells", "");
  const left = Math.max((width - side - margin) / 2, 0) + margin - 6,
    top = 4;
  const box = { x: left, y: top, width: side, height: tall };
  drawing.append(
    svg("image", { href: big.toDataURL(), ...box, preserveAspectRatio: "none" }),
    svg("rect", { ...box, fill: "none", stroke: "var(--grid)" }),
  );
  // Ticks are positions of the sequence, of which a cell can hold several.
  const marks = (count) =>
    tokens ? [...Array(count).keys()] : ticksOf(0, reach(count) - 1 || 1, 5).filter(Number.isInteger);
  const spot = (mark, count) => (mark + 0.5) / (tokens ? count : reach(count));
  const words = (mark, count) => (tokens ? short(visible(names(mark, count)), 8) : mark);
  const style = { "text-anchor": "end", "font-size": 11 };
  for (const row of marks(rows))
    drawing.append(text(left - 5, top + tall * spot(row, rows) + 4, words(row, rows), style));
  for (const column of marks(columns)) {
    const [x, y] = [left + side * spot(column, columns), top + tall];
    const turned = { ...style, transform: `translate(${x + 4} ${y + 6}) rotate(-90)` };
    const name = words(column, columns);
    drawing.append(tokens ? text(0, 0, name, turned) : text(x, y + 14, name, { ...style, ...CENTRED }));
  }
  const foot = top + tall + (tokens ? 62 : 22);
  const shade = ramp(diverging ? "split" : "heat");
  for (let step = 0; step < 24; step += 1)
    drawing.append(rect(left + step * 5, foot, 5.3, 10, { fill: `rgb(${shade(step / 23)})` }));
  drawing.append(
    text(left, foot + 23, diverging ? number(-limit) : "0", { "font-size": 11 }),
    text(left + 120, foot + 23, number(limit), style),
    text(left + 130, foot + 9, `${range} · query ↓ key →`, { "font-size": 11 }),
  );
  const outline = { fill: "none", stroke: "var(--focus)", "pointer-events": "none", visibility: "hidden" };
  const across = svg("rect", outline);
  const down = across.cloneNode();
  drawing.append(across, down);
  let at = [0, 0];
  const show = (row, column, x, y) => {
    at = [clamp(row, 0, rows - 1), clamp(column, 0, columns - 1)];
    const [high, wide] = [tall / rows, side / columns];
    fill(across, { ...box, y: top + at[0] * high, height: high, visibility: "visible" });
    fill(down, { ...box, x: left + at[1] * wide, width: wide, visibility: "visible" });
    showTip(cell(...at), x ?? down.getBoundingClientRect().right, y ?? across.getBoundingClientRect().y);
    choose?.(at[0], rows);
  };
  const hide = () => {
    for (const one of [across, down]) one.setAttribute("visibility", "hidden");
    hideTip();
  };
  const follow = (event) => {
    const place = drawing.getBoundingClientRect(),
      zoom = width / place.width;
    const column = Math.floor((((event.clientX - place.x) * zoom - left) / side) * columns);
    const row = Math.floor((((event.clientY - place.y) * zoom - top) / tall) * rows);
    if (row < 0 || column < 0 || row >= rows || column >= columns) hide();
    else show(row, column, event.clientX, event.clientY);
  };
  const keydown = (event) => {
    if (!ARROWS[event.key]) return;
    const [i, j] = ARROWS[event.key];
    event.preventDefault();
    show(at[0] + i, at[1] + j);
  };
  return fill(drawing, { pointermove: follow, pointerdown: follow, pointerleave: hide, blur: hide, keydown });
}

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
  const shade = diverging ? ramp("split", 5) : ramp("heat", 4);
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

// `cell(row, column)` says what stands there; `choose(row)` is told of the row under the pointer.
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
  drawing.append(
    svg("image", {
      href: big.toDataURL(),
      x: left,
      y: top,
      width: side,
      height: tall,
      preserveAspectRatio: "none",
    }),
  );
  drawing.append(
    svg("rect", { x: left, y: top, width: side, height: tall, fill: "none", stroke: "var(--grid)" }),
  );
  // Ticks are positions of the sequence, of which a cell can hold several.
  const marks = (count) =>
    tokens ? [...Array(count).keys()] : ticksOf(0, reach(count) - 1 || 1, 5).filter(Number.isInteger);
  const spot = (mark, count) => (mark + 0.5) / (tokens ? count : reach(count));
  for (const row of marks(rows))
    drawing.append(
      text(left - 5, top + tall * spot(row, rows) + 4, tokens ? short(visible(names(row, rows)), 8) : row, {
        "text-anchor": "end",
        "font-size": 11,
      }),
    );
  for (const column of marks(columns)) {
    const x = left + side * spot(column, columns),
      y = top + tall + (tokens ? 6 : 14);
    drawing.append(
      tokens
        ? text(0, 0, short(visible(names(column, columns)), 8), {
            transform: `translate(${x + 4} ${y}) rotate(-90)`,
            "text-anchor": "end",
            "font-size": 11,
          })
        : text(x, y, column, { "text-anchor": "middle", "font-size": 11 }),
    );
  }
  const foot = top + tall + (tokens ? 62 : 22);
  const shade = diverging ? ramp("split", 5) : ramp("heat", 4);
  for (let step = 0; step < 24; step += 1) {
    drawing.append(
      svg("rect", { x: left + step * 5, y: foot, width: 5.3, height: 10, fill: `rgb(${shade(step / 23)})` }),
    );
  }
  drawing.append(
    text(left, foot + 23, diverging ? number(-limit) : "0", { "font-size": 11 }),
    text(left + 120, foot + 23, number(limit), { "font-size": 11, "text-anchor": "end" }),
    text(left + 130, foot + 9, `${range} · query ↓ key →`, { "font-size": 11 }),
  );
  const across = svg("rect", {
    fill: "none",
    stroke: "var(--focus)",
    "pointer-events": "none",
    visibility: "hidden",
  });
  const down = across.cloneNode();
  drawing.append(across, down);
  let at = [0, 0];
  const show = (row, column, x, y) => {
    at = [clamp(row, 0, rows - 1), clamp(column, 0, columns - 1)];
    const [high, wide] = [tall / rows, side / columns];
    fill(across, { x: left, y: top + at[0] * high, width: side, height: high, visibility: "visible" }, []);
    fill(down, { x: left + at[1] * wide, y: top, width: wide, height: tall, visibility: "visible" }, []);
    const box = down.getBoundingClientRect(),
      line = across.getBoundingClientRect();
    showTip(cell(...at), x ?? box.x + box.width, y ?? line.y);
    choose?.(at[0], rows);
  };
  const hide = () => {
    across.setAttribute("visibility", "hidden");
    down.setAttribute("visibility", "hidden");
    hideTip();
  };
  const follow = (event) => {
    const box = drawing.getBoundingClientRect(),
      zoom = width / box.width;
    const column = Math.floor((((event.clientX - box.x) * zoom - left) / side) * columns);
    const row = Math.floor((((event.clientY - box.y) * zoom - top) / tall) * rows);
    if (row < 0 || column < 0 || row >= rows || column >= columns) hide();
    else show(row, column, event.clientX, event.clientY);
  };
  fill(
    drawing,
    {
      pointermove: follow,
      pointerdown: follow,
      pointerleave: hide,
      blur: hide,
      keydown: (event) => {
        const [i, j] =
          { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key] ?? [];
        if (i === undefined) return;
        event.preventDefault();
        show(at[0] + i, at[1] + j);
      },
    },
    [],
  );
  return drawing;
}

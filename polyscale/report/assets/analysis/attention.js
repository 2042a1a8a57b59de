// Attention maps: one or two side by side, one token's view, and thumbnails of all heads.

let query = [0, 1]; // the chosen row of a map, and of how many

function attentionSection(place) {
  const maps = data.attention.filter((entry) => has(entry.map) && has(entry.map[0]));
  const find = (whom) => maps.find((entry) => matches(entry, whom));
  const cards = attentionMaps(place, maps, find);
  if (has(data.meta.tokens)) tokenView(place, find);
  attentionThumbnails(cards, maps, find);
}

function attentionMaps(place, maps, find) {
  const elsewhere = ofHead(maps).find((entry) => entry.level !== choice.level);
  const other = { ...choice, level: elsewhere?.level ?? choice.level };
  const compare = html("input", { type: "checkbox", change: refresh });
  const contrasts = [
    [0.5, "strong contrast"],
    [1, "true to scale"],
  ];
  const contrast = select(contrasts, { change: refresh });
  const second = html("span", { class: "choices" });
  const check = html("label", { class: "check" }, compare, "compare with");
  place.append(html("div", { class: "choices" }, labelled("Colours", contrast), check, second));
  chooser(second, maps, other, "compared ");
  listen(() => {
    second.hidden = !compare.checked;
  });
  const cards = grid(place);
  const choose = (row, count) => {
    query = [row, count];
    refreshTokens();
  };
  const draw = (whom) => (width, label) => {
    const entry = find(whom);
    if (!entry) return noneFor(maps, whom, "map");
    const shown = [find(choice), compare.checked && find(other)].filter(Boolean);
    const limit = extent(shown.map((one) => one.map));
    const options = { limit, contrast: Number(contrast.value), range: "weight", choose };
    return drawMap(width, label, entry.map, { ...options, pooled: entry.pooled_from });
  };
  const title = (whom) => () => {
    const entry = find(whom);
    const pooled = entry?.pooled_from;
    return whose(whom) + (pooled ? `, ${pooled} positions averaged into ${entry.map.length}` : "");
  };
  const drawDifference = (width, label) => {
    const [first, then] = [find(choice)?.map, find(other)?.map];
    if (!first || !then || first.length !== then.length || first[0].length !== then[0].length)
      return "The two maps differ in size, so there is no difference to show.";
    const minus = (value, from) => (isNumber(value) && isNumber(from) ? value - from : null);
    const matrix = first.map((row, i) => row.map((value, j) => minus(value, then[i][j])));
    const options = { diverging: true, contrast: Number(contrast.value), range: "difference" };
    return drawMap(width, label, matrix, { ...options, pooled: find(choice).pooled_from });
  };
  const compared = (make) => (width, label) => (compare.checked ? make(width, label) : null);
  figure(cards, "attention", title(choice), draw(choice));
  figure(cards, "attention-compared", title(other), compared(draw(other)));
  figure(cards, "attention-difference", "First minus second", compared(drawDifference));
  return cards;
}

// The example itself: choose a token as the query, and see what it attends to.
let refreshTokens = () => {};
function tokenView(place, find) {
  const spans = data.meta.tokens.map((token, index) =>
    html("span", { role: "option", tabindex: -1, "data-index": index }, visible(token)),
  );
  const selected = () => Math.min(Math.floor(((query[0] + 0.5) * spans.length) / query[1]), spans.length - 1);
  const cellOf = (index, cells) => cells[Math.floor(((index + 0.5) * cells.length) / spans.length)];
  const choose = (index) => {
    query = [index, spans.length];
    refreshTokens();
    spans[index].focus();
  };
  const click = ({ target: { dataset } }) => {
    if (dataset.index) choose(Number(dataset.index));
  };
  const keydown = (event) => {
    const step = stepOf(event);
    if (!step) return;
    event.preventDefault();
    choose(clamp(selected() + step, 0, spans.length - 1));
  };
  const role = { role: "listbox", "aria-label": "Tokens: choose the query" };
  const strip = html("div", { class: "tokens", ...role, click, keydown }, spans);
  const note =
    "The outlined token is the query: click another, use the arrow keys, or move over a row of the map.";
  const view = html(
    "div",
    {},
    html("h3", {}, "What one token attends to"),
    html("p", { class: "note" }, note),
    strip,
  );
  place.append(view);
  refreshTokens = () => {
    const map = find(choice)?.map;
    view.hidden = !map;
    if (!map) return;
    const [at, shade] = [selected(), ramp("heat")];
    const row = cellOf(at, map);
    const top = largest(row) > 0 ? largest(row) : 1;
    spans.forEach((span, index) => {
      const value = cellOf(index, row);
      const paint = shade(Math.sqrt(Math.max(value ?? 0, 0) / top));
      const weight = value === null ? "masked" : number(value, 4);
      const tip = `${quote(spans[at].textContent)} → ${quote(span.textContent)}\n${weight}`;
      const chosen = index === at;
      fill(span, { "aria-selected": String(chosen), tabindex: chosen ? 0 : -1, "data-tip": tip });
      span.style.background = `rgb(${paint})`;
      span.style.color = readable(...paint);
    });
  };
  listen(() => refreshTokens());
}

function attentionThumbnails(cards, maps, find) {
  const [layers, heads] = ["layer", "head"].map((key) => unique(maps.map((entry) => entry[key])));
  if (heads.length * layers.length < 2) return;
  const gallery = html("div", { class: "thumbnails" });
  const title = html("figcaption");
  cards.append(html("figure", {}, title, gallery));
  const width = heads.length > 6 ? 1.6 : 2.5;
  gallery.style.gridTemplateColumns = `3.6rem repeat(${heads.length}, minmax(${width}rem, 6rem))`;
  const thumbnail = (layer, head) => {
    const entry = find({ ...choice, layer, head });
    if (!entry) return html("span", {}, "–");
    const picture = paintCells(html("canvas"), entry.map, { limit: extent([entry.map]), contrast: 0.5 });
    const tip = `${layerName(layer)}, ${headName(head)}`;
    const pick = JSON.stringify({ layer, head });
    return button(picture, null, { "aria-label": `Show ${tip}`, "data-pick": pick, "data-tip": tip });
  };
  let painted = "";
  listen(() => {
    const wanted = `${choice.level} ${colour("--page")}`;
    if (painted !== wanted) {
      painted = wanted;
      title.textContent = `All heads${atLevel(choice.level)}`;
      const row = (layer) => [
        html("span", {}, layerName(layer)),
        ...heads.map((head) => thumbnail(layer, head)),
      ];
      gallery.replaceChildren(...layers.flatMap(row));
    }
    const chosen = JSON.stringify({ layer: choice.layer, head: choice.head });
    for (const one of gallery.querySelectorAll("button"))
      one.setAttribute("aria-pressed", String(one.dataset.pick === chosen));
  });
}

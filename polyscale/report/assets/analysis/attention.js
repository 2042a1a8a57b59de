// Attention maps: one or two to look at closely, all heads at a glance, and one token's view.

function attentionSection(place) {
  const maps = data.attention.filter((entry) => has(entry.map) && has(entry.map[0]));
  const find = (choice) => maps.find((entry) => matches(entry, choice, ["layer", "head", "level"]));
  const other = {
    ...choice,
    level:
      maps.find((entry) => matches(entry, choice, ["layer", "head"]) && entry.level !== choice.level)
        ?.level ?? choice.level,
  };
  const compare = html("input", { type: "checkbox", change: refresh });
  const contrast = html(
    "select",
    { change: refresh },
    html("option", { value: 0.5 }, "strong contrast"),
    html("option", { value: 1 }, "true to scale"),
  );
  const second = html("span", { class: "choices" });
  place.append(
    html(
      "div",
      { class: "choices" },
      html("label", {}, "Colours", contrast),
      html("label", { class: "check" }, compare, "compare with"),
      second,
    ),
  );
  chooser(second, maps, other, "compared ");
  listen(() => {
    second.hidden = !compare.checked;
  });
  const cards = grid(place);
  let query = [0, 1];
  const settings = () => {
    const shown = [find(choice), compare.checked && find(other)].filter(Boolean);
    return {
      limit: extent(shown.map((entry) => entry.map)),
      contrast: Number(contrast.value),
      range: "weight",
      choose: (row, count) => {
        query = [row, count];
        paintTokens();
      },
    };
  };
  const draw = (whom) => (width, label) => {
    const entry = find(whom);
    if (!entry) return noneFor(maps, whom, "map");
    return drawMap(width, label, entry.map, { ...settings(), pooled: entry.pooled_from });
  };
  const pooled = (entry) =>
    entry?.pooled_from ? `, ${entry.pooled_from} positions averaged into ${entry.map.length}` : "";
  figure(cards, "attention", () => `${whose(choice)}${pooled(find(choice))}`, draw(choice));
  const compared = (make) => (width, label) => (compare.checked ? make(width, label) : null);
  figure(cards, "attention-compared", () => `${whose(other)}${pooled(find(other))}`, compared(draw(other)));
  figure(
    cards,
    "attention-difference",
    () => "First minus second",
    compared((width, label) => {
      const [first, then] = [find(choice)?.map, find(other)?.map];
      if (!first || !then || first.length !== then.length || first[0].length !== then[0].length)
        return "The two maps differ in size, so there is no difference to show.";
      const matrix = first.map((row, i) =>
        row.map((value, j) => (isNumber(value) && isNumber(then[i][j]) ? value - then[i][j] : null)),
      );
      return drawMap(width, label, matrix, {
        diverging: true,
        contrast: Number(contrast.value),
        range: "difference",
        pooled: find(choice).pooled_from,
      });
    }),
  );

  // The example itself: choose a token as the query, and see what it attends to.
  let paintTokens = () => {};
  if (has(data.meta.tokens)) {
    const spans = data.meta.tokens.map((token, index) =>
      html("span", { role: "option", tabindex: -1, "data-index": index }, visible(token)),
    );
    const strip = html(
      "div",
      { class: "tokens", role: "listbox", "aria-label": "Tokens: choose the query" },
      spans,
    );
    const selected = () =>
      Math.min(Math.floor(((query[0] + 0.5) * spans.length) / query[1]), spans.length - 1);
    paintTokens = () => {
      const map = find(choice)?.map;
      strip.parentElement.hidden = !map;
      if (!map) return;
      const at = selected(),
        row = map[Math.floor(((at + 0.5) * map.length) / spans.length)];
      const shade = ramp("heat", 4),
        top = largest(row) > 0 ? largest(row) : 1;
      spans.forEach((span, index) => {
        const value = row[Math.floor(((index + 0.5) * row.length) / spans.length)];
        const paint = shade(Math.sqrt(Math.max(value ?? 0, 0) / top));
        fill(
          span,
          {
            "aria-selected": String(index === at),
            tabindex: index === at ? 0 : -1,
            "data-tip": `${quote(spans[at].textContent)} → ${quote(span.textContent)}\n${value === null ? "masked" : number(value, 4)}`,
          },
          [],
        );
        span.style.background = `rgb(${paint})`;
        span.style.color = readable(...paint);
      });
    };
    const choose = (index) => {
      query = [index, spans.length];
      paintTokens();
      spans[index].focus();
    };
    fill(
      strip,
      {
        click: (event) => {
          if (event.target.dataset.index) choose(Number(event.target.dataset.index));
        },
        keydown: (event) => {
          const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
          if (step) {
            event.preventDefault();
            choose(clamp(selected() + step, 0, spans.length - 1));
          }
        },
      },
      [],
    );
    place.append(
      html(
        "div",
        {},
        html("h3", {}, "What one token attends to"),
        html(
          "p",
          { class: "note" },
          "The outlined token is the query: click another, use the arrow keys, or move over a row of the map.",
        ),
        strip,
      ),
    );
    listen(() => paintTokens());
  }

  const heads = unique(maps.map((entry) => entry.head)),
    layers = unique(maps.map((entry) => entry.layer));
  if (heads.length * layers.length < 2) return;
  const gallery = html("div", { class: "thumbnails" });
  const title = html("figcaption");
  cards.append(html("figure", {}, title, gallery));
  let painted = "";
  listen(() => {
    const wanted = `${choice.level} ${colour("--page")}`;
    for (const button of gallery.querySelectorAll("button"))
      button.setAttribute(
        "aria-pressed",
        String(button.dataset.pick === JSON.stringify({ layer: choice.layer, head: choice.head })),
      );
    if (painted === wanted) return;
    painted = wanted;
    title.textContent = `All heads${atLevel(choice.level)}`;
    gallery.style.gridTemplateColumns = `3.6rem repeat(${heads.length}, minmax(${heads.length > 6 ? 1.6 : 2.5}rem, 6rem))`;
    gallery.replaceChildren(
      ...layers.flatMap((layer) => [
        html("span", {}, layerName(layer)),
        ...heads.map((head) => {
          const entry = find({ ...choice, layer, head });
          if (!entry) return html("span", {}, "–");
          const picture = paintCells(html("canvas"), entry.map, {
            limit: extent([entry.map]),
            contrast: 0.5,
          });
          return html(
            "button",
            {
              type: "button",
              "aria-label": `Show ${layerName(layer)}, ${headName(head)}`,
              "aria-pressed": String(layer === choice.layer && head === choice.head),
              "data-pick": JSON.stringify({ layer, head }),
              "data-tip": `${layerName(layer)}, ${headName(head)}`,
            },
            picture,
          );
        }),
      ]),
    );
  });
}

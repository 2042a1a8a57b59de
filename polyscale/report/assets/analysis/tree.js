// The tree of hierarchical attention: where it loses, and what a finer one would buy.

function treeSection(place) {
  const { layers, tree } = data.hsa;
  const mine = () => layers.find((entry) => matches(entry, choice, ["layer", "head"]));
  const cards = grid(place);
  let zoom = null;
  // Children and leaf counts from the parents; without a tree, from the families themselves.
  const build = (families) => {
    const nodes = new Map();
    const add = (node, parent, label) => nodes.set(node, { node, parent, label, children: [], leaves: 0 });
    if (has(tree?.parent)) tree.parent.forEach((parent, node) => add(node, parent, tree.label?.[node] ?? ""));
    for (const family of families) {
      if (!nodes.has(family.node)) add(family.node, family.parent, family.label);
      Object.assign(nodes.get(family.node), { family, label: family.label || nodes.get(family.node).label });
    }
    const roots = [];
    for (const one of nodes.values()) {
      const parent = one.parent === one.node ? null : nodes.get(one.parent);
      if (parent) parent.children.push(one);
      else roots.push(one);
    }
    const order = [...roots];
    for (let at = 0; at < order.length; at += 1) order.push(...order[at].children);
    for (const one of order.reverse())
      one.leaves = one.children.reduce((sum, child) => sum + child.leaves, 0) || one.family?.leaves || 1;
    return { nodes, roots };
  };
  const nameOf = (one) => visible(one.label || `node ${one.node}`).replaceAll("␣", " ");
  const say = (one) =>
    `${quote(short(nameOf(one), 60))} (node ${one.node})\n${one.leaves} ${one.leaves === 1 ? "leaf" : "leaves"}${one.family ? `\nKL ${number(one.family.kl)}\nenergy ${number(one.family.energy)}\ndilution ${number(one.family.dilution)}` : ""}`;

  const measure = html(
    "select",
    { change: refresh },
    ["kl", "energy", "dilution"].map((key) =>
      html("option", { value: key }, key === "kl" ? "KL to flat softmax" : key),
    ),
  );
  const back = html(
    "button",
    {
      type: "button",
      click: () => {
        zoom = null;
        refresh();
      },
    },
    "Whole tree",
  );
  cards.before(html("div", { class: "choices" }, html("label", {}, "Colour by", measure), back));
  figure(
    cards,
    "tree",
    () => `The tree: ${whose(choice, ["layer", "head"])}, KL ${number(mine()?.kl_total)} over all tokens`,
    (width, label) => {
      const entry = mine();
      if (!entry) return noneFor(layers, choice, "tree");
      const { nodes, roots } = build(entry.families);
      const top = nodes.has(zoom) ? [nodes.get(zoom)] : roots;
      back.disabled = !nodes.has(zoom);
      const values = entry.families.map((family) => family[measure.value]);
      const [low, high] = [Math.min(smallest(values), 0), largest(values)];
      const shade = ramp("heat", 4),
        total = top.reduce((sum, one) => sum + one.leaves, 0);
      const drawing = canvasOf(width, 0, label);
      let row = top,
        depth = 0,
        left = new Map(),
        x = 0;
      for (const one of top) {
        left.set(one, x);
        x += (one.leaves * width) / total;
      }
      for (; row.length && depth < 40; depth += 1) {
        const next = [];
        for (const one of row) {
          const wide = (one.leaves * width) / total,
            value = one.family?.[measure.value];
          if (wide < 0.7) continue;
          const paint = isNumber(value) ? shade(Math.sqrt((value - low) / (high - low || 1))) : null;
          drawing.append(
            svg("rect", {
              x: left.get(one) + 0.5,
              y: 26 * depth + 1,
              width: Math.max(wide - 1, 0.5),
              height: 24,
              rx: Math.min(3, wide / 4),
              fill: paint ? `rgb(${paint})` : "var(--page)",
              stroke: "var(--grid)",
              "data-tip": say(one),
              "data-node": one.children.length ? one.node : null,
              "data-pick": one.children.length ? "{}" : null,
            }),
          );
          if (wide > 30)
            drawing.append(
              text(left.get(one) + wide / 2, 26 * depth + 17, short(nameOf(one), Math.floor(wide / 7.5)), {
                "text-anchor": "middle",
                "font-size": 11,
                fill: paint ? readable(...paint) : "var(--ink)",
                "pointer-events": "none",
              }),
            );
          let at = left.get(one);
          for (const child of one.children) {
            left.set(child, at);
            at += (child.leaves * width) / total;
            next.push(child);
          }
        }
        row = next;
      }
      fill(
        drawing,
        {
          viewBox: `0 0 ${width} ${26 * depth + 2}`,
          height: 26 * depth + 2,
          click: (event) => {
            if (event.target.dataset.node === undefined) return;
            const node = Number(event.target.dataset.node);
            zoom = zoom === node ? nodes.get(node).parent : node;
            refresh();
          },
        },
        [],
      );
      return drawing;
    },
    {
      full: true,
      caption:
        "Each box is a node as wide as its leaves; darker families (brighter on a dark page) score higher. Click a family to look closer, and again to step back.",
    },
  );

  table(
    place,
    "Families that lose most",
    ["family", "node", "leaves", "depth", "KL", "of the total", "energy", "dilution"],
    () => {
      const entry = mine();
      if (!entry) return [];
      const sum = entry.kl_total || entry.families.reduce((all, family) => all + (family.kl ?? 0), 0);
      const worst = [...entry.families].sort((a, b) => (b.kl ?? -Infinity) - (a.kl ?? -Infinity)).slice(0, 8);
      return worst.map((family) => ({
        cells: [
          html(
            "button",
            {
              type: "button",
              click: () => {
                zoom = family.node;
                refresh();
                document.getElementById("hsa").scrollIntoView();
              },
            },
            short(nameOf(family), 32),
          ),
          String(family.node),
          number(family.leaves),
          number(family.depth),
          number(family.kl),
          percent(sum ? (family.kl ?? 0) / sum : null),
          number(family.energy),
          number(family.dilution),
        ],
      }));
    },
  );
  const cost = (before, after) =>
    isNumber(before) && isNumber(after) ? `${compact(before)} → ${compact(after)}` : "n/a";
  table(
    place,
    "What a finer tree would buy",
    ["open the family", "node", "KL before", "KL after", "saved", "scores to compute"],
    () => {
      const names = new Map(mine()?.families.map((family) => [family.node, nameOf(family)]));
      return (mine()?.finer ?? []).map((one) => ({
        cells: [
          short(names.get(one.node) ?? `node ${one.node}`, 32),
          String(one.node),
          number(one.kl_before),
          number(one.kl_after),
          percent(1 - one.kl_after / one.kl_before),
          cost(one.scores_before, one.scores_after),
        ],
      }));
    },
  );

  // The same tree as words, for reading line by line; children are made when they are asked for.
  const outline = html("div", { class: "tree" });
  place.append(html("h3", {}, "The tree, family by family"), outline);
  const LIMIT = 200;
  listen(() => {
    const entry = mine();
    if (!entry) return outline.replaceChildren();
    const { roots } = build(entry.families);
    const top = largest(entry.families.map((family) => family.kl)) || 1;
    const line = (one) => [
      html("span", { class: "name" }, short(nameOf(one), 80)),
      html("span", { class: "value" }, `${one.leaves} ${one.leaves === 1 ? "leaf" : "leaves"}`),
      ...(one.family
        ? [
            html("span", { class: "value" }, `KL ${number(one.family.kl, 2)}`),
            html(
              "span",
              { class: "share" },
              html("i", { style: `width:${clamp((100 * (one.family.kl ?? 0)) / top, 0, 100)}%` }),
            ),
          ]
        : []),
    ];
    const list = (many, open) => {
      const lines = many.slice(0, LIMIT).map((one) => branch(one, open));
      if (many.length > LIMIT) lines.push(html("div", { class: "leaf" }, `and ${many.length - LIMIT} more`));
      return lines;
    };
    const branch = (one, open) => {
      if (!one.children.length) return html("div", { class: "leaf", "data-tip": say(one) }, line(one));
      const inside = html("div");
      const unfold = () => {
        if (!inside.hasChildNodes()) inside.append(...list(one.children, false));
      };
      if (open) unfold();
      return html(
        "details",
        { open, toggle: unfold },
        html("summary", { "data-tip": say(one) }, line(one)),
        inside,
      );
    };
    return outline.replaceChildren(...list(roots, true));
  });
}

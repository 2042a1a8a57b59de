// The tree of hierarchical attention: where it loses, and what a finer one would save.

const nodeName = (one) => visible(one.label || `node ${one.node}`).replaceAll("␣", " ");
const leafCount = ({ leaves }) => `${leaves} ${leaves === 1 ? "leaf" : "leaves"}`;
const describeNode = (one) => {
  const { kl, energy, dilution } = one.family ?? {};
  const measured = one.family && `KL ${number(kl)}\nenergy ${number(energy)}\ndilution ${number(dilution)}`;
  return lines(`${quote(short(nodeName(one), 60))} (node ${one.node})`, leafCount(one), measured);
};

// Children and leaf counts from the parents; without a tree, from the families themselves.
function buildTree(tree, families) {
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
    (parent ? parent.children : roots).push(one);
  }
  const order = [...roots];
  for (let at = 0; at < order.length; at += 1) order.push(...order[at].children);
  for (const one of order.reverse())
    one.leaves = one.children.reduce((sum, child) => sum + child.leaves, 0) || one.family?.leaves || 1;
  return { nodes, roots };
}

function treeSection(place) {
  const { layers, tree } = data.hsa;
  const mine = () => ofHead(layers)[0];
  let zoom = null;
  const zoomTo = (node) => {
    zoom = node;
    refresh();
  };
  const names = { kl: "KL to flat softmax", energy: "energy", dilution: "dilution" };
  const measure = select(Object.entries(names), { change: refresh });
  const back = button("Whole tree", () => zoomTo(null));
  place.append(html("div", { class: "choices" }, labelled("Colour by", measure), back));
  const title = () =>
    `The tree: ${whose(choice, ["layer", "head"])}, KL ${number(mine()?.kl_total)} over all tokens`;
  const caption =
    "Each box is a node as wide as its leaves; darker families (brighter on a dark page) score higher. Click a family to look closer, and again to step back.";
  const draw = (width, label) => {
    const entry = mine();
    if (!entry) return noneFor(layers, choice, "tree");
    const { nodes, roots } = buildTree(tree, entry.families);
    back.disabled = !nodes.has(zoom);
    const top = nodes.has(zoom) ? [nodes.get(zoom)] : roots;
    const drawing = drawTree(width, label, top, entry.families, measure.value);
    const click = ({ target: { dataset } }) => {
      if (dataset.node !== undefined)
        zoomTo(zoom === Number(dataset.node) ? nodes.get(zoom).parent : Number(dataset.node));
    };
    return fill(drawing, { click });
  };
  figure(grid(place), "tree", title, draw, { full: true, caption });
  treeTables(place, mine, zoomTo);
  treeOutline(place, mine, tree);
}

// Rows of boxes, parents above their children.
function drawTree(width, label, top, families, measure) {
  const values = families.map((family) => family[measure]);
  const [low, high] = [Math.min(smallest(values), 0), largest(values)];
  const shade = ramp("heat");
  const unit = width / top.reduce((sum, one) => sum + one.leaves, 0);
  const boxes = svg("g");
  const lay = (row, x) =>
    row.map((one) => {
      x += one.leaves * unit;
      return [one, x - one.leaves * unit];
    });
  let row = lay(top, 0),
    depth = 0;
  for (; row.length && depth < 40; depth += 1) {
    row = row.filter(([one]) => one.leaves * unit >= 0.7);
    for (const [one, x] of row) {
      const [wide, value] = [one.leaves * unit, one.family?.[measure]];
      const paint = isNumber(value) ? shade(Math.sqrt((value - low) / (high - low || 1))) : null;
      const inner = one.children.length > 0;
      const box = {
        rx: Math.min(3, wide / 4),
        fill: paint ? `rgb(${paint})` : "var(--page)",
        stroke: "var(--grid)",
      };
      const marks = {
        "data-tip": describeNode(one),
        "data-node": inner ? one.node : null,
        "data-pick": inner && "{}",
      };
      boxes.append(rect(x + 0.5, 26 * depth + 1, Math.max(wide - 1, 0.5), 24, { ...box, ...marks }));
      if (wide <= 30) continue;
      const style = {
        "font-size": 11,
        fill: paint ? readable(...paint) : "var(--ink)",
        "pointer-events": "none",
      };
      const name = short(nodeName(one), Math.floor(wide / 7.5));
      boxes.append(text(x + wide / 2, 26 * depth + 17, name, { ...CENTRED, ...style }));
    }
    row = row.flatMap(([one, x]) => lay(one.children, x));
  }
  return canvasOf(width, 26 * depth + 2, label, boxes);
}

function treeTables(place, mine, zoomTo) {
  const look = (family) => {
    zoomTo(family.node);
    document.getElementById("hsa").scrollIntoView();
  };
  const total = () => mine().kl_total || mine().families.reduce((all, family) => all + (family.kl ?? 0), 0);
  const families = [
    ["family", (family) => button(short(nodeName(family), 32), () => look(family))],
    ["node", (family) => String(family.node)],
    ["leaves", (family) => number(family.leaves)],
    ["depth", (family) => number(family.depth)],
    ["KL", (family) => number(family.kl)],
    ["of the total", (family) => percent(total() ? (family.kl ?? 0) / total() : null)],
    ["energy", (family) => number(family.energy)],
    ["dilution", (family) => number(family.dilution)],
  ];
  const worst = () => [...(mine()?.families ?? [])].sort((a, b) => (b.kl ?? -Infinity) - (a.kl ?? -Infinity));
  table(place, "Families that lose most", families, () => worst().slice(0, 8));
  const named = (node) => mine().families.find((family) => family.node === node) ?? { node };
  const opened = [
    ["open the family", (one) => short(nodeName(named(one.node)), 32)],
    ["node", (one) => String(one.node)],
    ["KL before", (one) => number(one.kl_before)],
    ["KL after", (one) => number(one.kl_after)],
    ["saved", (one) => percent(1 - one.kl_after / one.kl_before)],
    ["scores to compute", (one) => `${compact(one.scores_before)} → ${compact(one.scores_after)}`],
  ];
  table(place, "What a finer tree would save", opened, () => mine()?.finer ?? []);
}

// The same tree as nested lists, to read line by line; children are made when they are opened.
function treeOutline(place, mine, tree) {
  const LIMIT = 200;
  const outline = html("div", { class: "tree" });
  place.append(html("h3", {}, "The tree, family by family"), outline);
  listen(() => {
    const entry = mine();
    if (!entry) return outline.replaceChildren();
    const top = largest(entry.families.map((family) => family.kl)) || 1;
    const share = ({ kl }) => {
      const bar = html("i", { style: `width:${clamp((100 * (kl ?? 0)) / top, 0, 100)}%` });
      return [html("span", { class: "value" }, `KL ${number(kl, 2)}`), html("span", { class: "share" }, bar)];
    };
    const line = (one) => [
      html("span", { class: "name" }, short(nodeName(one), 80)),
      html("span", { class: "value" }, leafCount(one)),
      ...(one.family ? share(one.family) : []),
    ];
    const branches = (many, open) =>
      [
        ...many.slice(0, LIMIT).map((one) => branch(one, open)),
        many.length > LIMIT && html("div", { class: "leaf" }, `and ${many.length - LIMIT} more`),
      ].filter(Boolean);
    const branch = (one, open) => {
      const tip = { "data-tip": describeNode(one) };
      if (!one.children.length) return html("div", { class: "leaf", ...tip }, line(one));
      const inside = html("div");
      const toggle = () => {
        if (!inside.hasChildNodes()) inside.append(...branches(one.children, false));
      };
      if (open) toggle();
      return html("details", { open, toggle }, html("summary", tip, line(one)), inside);
    };
    return outline.replaceChildren(...branches(buildTree(tree, entry.families).roots, true));
  });
}

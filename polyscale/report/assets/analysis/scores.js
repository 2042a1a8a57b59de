// What the scores are made of: level weights, eigenvalues, symmetric and antisymmetric parts.

function levelsSection(place) {
  const { weights } = data.levels;
  const levels = weights[0][0].map((_, level) => level);
  const names = levels.map((level) => ({ name: levelName(level), colour: levelColour(level) }));
  const row = (label, shares, pick, chosen) => ({
    label,
    pick,
    chosen,
    parts: shares.map((value, level) => levelPart(level, value, percent, label)),
  });
  const draw = (width, label, rows) =>
    barChart(width, label, { rows, names, axis: "share of the merged score", form: percent, whole: true });
  const mean = (heads) =>
    levels.map((level) => heads.reduce((sum, shares) => sum + shares[level], 0) / heads.length);
  const cards = grid(place);
  if (weights.length > 1)
    figure(cards, "level-weights-layers", "Mean over heads, each layer", (width, label) => {
      const layerRow = (heads, layer) =>
        row(layerName(layer), mean(heads), { layer }, layer === choice.layer);
      return draw(width, label, weights.map(layerRow));
    });
  const title = () => `Heads of ${layerName(choice.layer)}`;
  figure(cards, "level-weights-heads", title, (width, label) => {
    const heads = weights[choice.layer];
    if (!heads) return `No level weights for ${layerName(choice.layer)}.`;
    const headRow = (shares, head) => row(headName(head), shares, { head }, head === choice.head);
    return draw(width, label, heads.map(headRow));
  });
}

function kernelSection(place) {
  const { forms, scores, note } = data.kernel;
  if (note) place.append(html("p", { class: "note" }, note));
  const cards = grid(place);
  const verdict = (entry) => ({
    value: entry.negative_share,
    text: entry.psd ? "✓" : percent(entry.negative_share),
    tip: [
      `PSD condition ${entry.psd ? "holds" : "fails"}, margin ${number(entry.margin)}`,
      `smallest eigenvalue ${number(entry.smallest)}`,
      `${percent(entry.fraction_negative)} of them negative`,
      `${percent(entry.negative_share)} of their size`,
      "psd_with_bias" in entry && `with biases it ${entry.psd_with_bias ? "holds" : "fails"}`,
    ],
  });
  const caption = "Negative share of the eigenvalues, by size; ✓ where the PSD condition holds.";
  const shown = { form: percent, caption };
  const level = () => choice.level;
  if (has(forms)) {
    const perLevel = forms.some((entry) => isNumber(entry.level));
    const options = perLevel ? { level, ...shown } : shown;
    overview(cards, "kernel-forms-overview", "Bilinear form, all heads", forms, "form", verdict, options);
    const title = () => `Bilinear form: ${whose(choice, perLevel ? undefined : ["layer", "head"])}`;
    figure(cards, "kernel-form", title, drawSpectrum(forms, false));
  }
  if (has(scores)) {
    const options = { level, ...shown };
    overview(
      cards,
      "kernel-scores-overview",
      "Scores on data, all heads",
      scores,
      "eigenvalues",
      verdict,
      options,
    );
    figure(cards, "kernel-scores", () => `Scores on data: ${whose(choice)}`, drawSpectrum(scores, true));
  }
}

// Eigenvalues that are not listed lie in the middle of those of scores; of a form they are zeros.
const drawSpectrum = (list, inMiddle) => (width, label) => {
  const entry = list.find((one) => matches(one, choice));
  if (!entry) return noneFor(list, choice, "eigenvalues");
  const values = entry.eigenvalues;
  const size = Math.max(entry.size, values.length);
  const gap = size - values.length;
  const half = inMiddle ? Math.ceil(values.length / 2) : values.filter((value) => value >= 0).length;
  const zero = 1e-9 * Math.max(largest(values), -smallest(values));
  const paint = (_, value) =>
    Math.abs(value) <= zero ? "var(--soft)" : value < 0 ? "var(--series-0)" : "var(--series-1)";
  const points = values.map((value, at) => [at + 1 + (at < half ? 0 : gap), value]);
  const tip = (rank, value) => `eigenvalue ${rank} of ${size}: ${number(value, 4)}`;
  const listed = gap ? `, ${values.length} of ${size} listed` : "";
  const across = `rank${listed} · ${percent(entry.negative_share)} negative by size`;
  const series = [{ points, line: false, paint, tip }];
  return lineChart(width, label, { zero: true, whole: true, across, up: "eigenvalue", series });
};

function symmetrySection(place) {
  const { parts, maps } = data.symmetry;
  const cards = grid(place);
  const names = [
    { name: "reciprocal", colour: "var(--series-1)" },
    { name: "directional", colour: "var(--series-0)" },
  ];
  const bar = (entry) => {
    const part = ({ name, colour: paint }) => {
      const share = `${levelName(entry.level)}, ${name}: ${percent(entry[name])}`;
      return { value: entry[name], colour: paint, tip: lines(share, `energy ${number(entry.energy)}`) };
    };
    const [pick, chosen] = [{ level: entry.level }, entry.level === choice.level];
    return { label: levelName(entry.level), pick, chosen, parts: names.map(part) };
  };
  if (has(parts)) {
    const axis = "share of the scores' energy";
    headFigure(cards, "symmetry-shares", "Shares", parts, "symmetry share", (width, label, here) =>
      barChart(width, label, { rows: here.map(bar), names, form: percent, whole: true, axis }),
    );
    const describe = (entry) => ({
      value: entry.directional,
      tip: [`directional ${percent(entry.directional)}`, `reciprocal ${percent(entry.reciprocal)}`],
    });
    const options = { level: () => choice.level, form: percent };
    overview(
      cards,
      "symmetry-overview",
      "Directional share, all heads",
      parts,
      "symmetry share",
      describe,
      options,
    );
  }
  if (!has(maps)) return;
  for (const [name, title] of [
    ["symmetric", "Reciprocal part"],
    ["antisymmetric", "Directional part"],
  ]) {
    figure(
      cards,
      `symmetry-${name}`,
      () => `${title}: ${whose(choice)}`,
      (width, label) => {
        const entry = maps.find((one) => matches(one, choice));
        if (!has(entry?.[name])) return noneFor(maps, choice, "map");
        const limit = extent([entry.symmetric, entry.antisymmetric], true);
        const options = { diverging: true, limit, contrast: 0.7, range: "score", pooled: entry.pooled_from };
        return drawMap(width, label, entry[name], options);
      },
    );
  }
}

// What the scores are made of: level weights, eigenvalues, symmetric and antisymmetric parts.

function levelsSection(place) {
  const { weights } = data.levels;
  const names = weights[0][0].map((_, level) => ({ name: levelName(level), colour: levelColour(level) }));
  const row = (label, shares, pick, chosen) => ({
    label,
    pick,
    chosen,
    parts: shares.map((value, level) => ({
      value,
      colour: levelColour(level),
      tip: `${label}\n${levelName(level)}: ${percent(value)}`,
    })),
  });
  const draw = (rows) => (width, label) =>
    barChart(width, label, {
      rows: rows(),
      names,
      axis: "share of the merged score",
      form: percent,
      whole: true,
    });
  const mean = (heads) =>
    names.map((_, level) => heads.reduce((sum, shares) => sum + shares[level], 0) / heads.length);
  const cards = grid(place);
  if (weights.length > 1)
    figure(
      cards,
      "level-weights-layers",
      "Mean over heads, each layer",
      draw(() =>
        weights.map((heads, layer) => row(layerName(layer), mean(heads), { layer }, layer === choice.layer)),
      ),
    );
  figure(
    cards,
    "level-weights-heads",
    () => `Heads of ${layerName(choice.layer)}`,
    (width, label) => {
      const heads = weights[choice.layer];
      if (!heads) return `No level weights for ${layerName(choice.layer)}.`;
      return draw(() =>
        heads.map((shares, head) => row(headName(head), shares, { head }, head === choice.head)),
      )(width, label);
    },
  );
}

function kernelSection(place) {
  const { forms, scores, note } = data.kernel;
  if (note) place.append(html("p", { class: "note" }, note));
  const cards = grid(place);
  // By size where it is known: a head with free weights has as many negative as positive ones.
  const weighed = [...(forms ?? []), ...(scores ?? [])].some((entry) => isNumber(entry.negative_share));
  const share = (entry) => (weighed ? entry.negative_share : entry.fraction_negative);
  const verdict = (entry) => ({
    value: share(entry),
    text: entry.psd ? "✓" : percent(share(entry)),
    tip: [
      `PSD condition ${entry.psd ? "holds" : "fails"}, margin ${number(entry.margin)}`,
      `smallest eigenvalue ${number(entry.smallest)}`,
      `${percent(entry.fraction_negative)} of them negative`,
      weighed && `${percent(share(entry))} of their size`,
      "psd_with_bias" in entry && `with biases it ${entry.psd_with_bias ? "holds" : "fails"}`,
    ],
  });
  const caption = `Negative share of the eigenvalues${weighed ? ", by size" : ""}; ✓ where the PSD condition holds.`;
  const spectrum = (list, name, title) =>
    figure(cards, name, title, (width, label) => {
      const entry = list.find((one) => matches(one, choice, ["layer", "head", "level"]));
      if (!entry) return noneFor(list, choice, "eigenvalues");
      const values = entry.eigenvalues;
      const size = Math.max(entry.size ?? 0, values.length);
      // Those not listed lie between the largest and the smallest; of a form, they are zeros.
      const gap = size - values.length;
      const half =
        list === scores ? Math.ceil(values.length / 2) : values.filter((value) => value >= 0).length;
      const zero = 1e-9 * Math.max(largest(values), -smallest(values));
      const paint = (_, value) =>
        Math.abs(value) <= zero ? "var(--soft)" : value < 0 ? "var(--series-0)" : "var(--series-1)";
      const points = values.map((value, at) => [at + 1 + (at < half ? 0 : gap), value]);
      const tip = (rank, value) => `eigenvalue ${rank} of ${size}: ${number(value, 4)}`;
      const across = `rank${gap ? `, ${values.length} of ${size} listed` : ""} · ${percent(share(entry))} negative${weighed ? " by size" : ""}`;
      return lineChart(width, label, {
        zero: true,
        whole: true,
        across,
        up: "eigenvalue",
        series: [{ points, line: false, paint, tip }],
      });
    });
  const level = () => choice.level;
  if (has(forms)) {
    const leveled = forms.some((entry) => isNumber(entry.level)) ? { level } : {};
    overview(cards, "kernel-forms-overview", "Bilinear form, all heads", forms, "form", verdict, {
      ...leveled,
      form: percent,
      caption,
    });
    spectrum(
      forms,
      "kernel-form",
      () => `Bilinear form: ${whose(choice, leveled.level ? undefined : ["layer", "head"])}`,
    );
  }
  if (has(scores)) {
    overview(cards, "kernel-scores-overview", "Scores on data, all heads", scores, "eigenvalues", verdict, {
      level,
      form: percent,
      caption,
    });
    spectrum(scores, "kernel-scores", () => `Scores on data: ${whose(choice)}`);
  }
}

function symmetrySection(place) {
  const { parts, maps } = data.symmetry;
  const cards = grid(place);
  const names = [
    { name: "reciprocal", colour: "var(--series-1)" },
    { name: "directional", colour: "var(--series-0)" },
  ];
  if (has(parts)) {
    headFigure(cards, "symmetry-shares", "Shares", parts, "symmetry share", (width, label, here) => {
      const rows = here.map((entry) => ({
        label: levelName(entry.level),
        pick: { level: entry.level },
        chosen: entry.level === choice.level,
        parts: names.map(({ name, colour: paint }) => ({
          value: entry[name],
          colour: paint,
          tip: lines(
            `${levelName(entry.level)}, ${name}: ${percent(entry[name])}`,
            `energy ${number(entry.energy)}`,
          ),
        })),
      }));
      return barChart(width, label, {
        rows,
        names,
        form: percent,
        whole: true,
        axis: "share of the scores' energy",
      });
    });
    overview(
      cards,
      "symmetry-overview",
      "Directional share, all heads",
      parts,
      "symmetry share",
      (entry) => ({
        value: entry.directional,
        tip: [`directional ${percent(entry.directional)}`, `reciprocal ${percent(entry.reciprocal)}`],
      }),
      { level: () => choice.level, form: percent },
    );
  }
  for (const [name, title] of has(maps)
    ? [
        ["symmetric", "Reciprocal part"],
        ["antisymmetric", "Directional part"],
      ]
    : []) {
    figure(
      cards,
      `symmetry-${name}`,
      () => `${title}: ${whose(choice)}`,
      (width, label) => {
        const entry = maps.find((one) => matches(one, choice, ["layer", "head", "level"]));
        if (!has(entry?.[name])) return noneFor(maps, choice, "map");
        const limit = extent([entry.symmetric, entry.antisymmetric], true);
        return drawMap(width, label, entry[name], {
          diverging: true,
          limit,
          contrast: 0.7,
          range: "score",
          pooled: entry.pooled_from,
        });
      },
    );
  }
}

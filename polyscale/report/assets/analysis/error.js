// How far the merged attention is from flat attention, and what it costs.

const ERROR_PARTS = [
  ["resolution", "resolution", "var(--series-1)"],
  ["drift", "drift", "var(--series-2)"],
  ["non_gaussian", "non-Gaussian", "var(--series-0)"],
];

function errorSection(place) {
  const { rows, strides, levels, tail, decay } = data.error;
  const cards = grid(place);
  const title = ({ levels_used: used, stride }) =>
    `${used} level${used === 1 ? "" : "s"}${isNumber(stride) ? `, stride ${stride}` : ""}`;
  const names = ERROR_PARTS.map(([, name, paint]) => ({ name, colour: paint }));
  const axis = "nats, mean over queries; the line is the KL";
  const bar = (entry) => {
    const part = ([key, kind, paint]) => {
      const share = `${kind}: ${number(entry[key])} of ${number(entry.kl)}`;
      const tip = lines(title(entry), share, `total variation ${number(entry.total_variation)}`);
      return { value: entry[key], colour: paint, tip };
    };
    return { label: title(entry), mark: entry.kl, parts: ERROR_PARTS.map(part) };
  };
  const decomposition = (list, name, heading) =>
    headFigure(cards, name, heading, list, "decomposition", (width, label, here) =>
      barChart(width, label, { names, rows: here.map(bar), axis }),
    );
  if (has(rows)) {
    decomposition(rows, "error-levels", "With more and more levels");
    const counts = rows.map((entry) => entry.levels_used);
    const own = counts.includes(data.meta.levels) ? data.meta.levels : largest(counts);
    const trained = rows.filter((entry) => entry.levels_used === own);
    overview(cards, "error-heads", `KL with ${own} levels, all heads`, trained, "KL", (entry) => ({
      value: entry.kl,
      tip: [`KL ${number(entry.kl)}`, ...ERROR_PARTS.map(([key, kind]) => `${kind} ${number(entry[key])}`)],
    }));
  }
  if (has(strides)) decomposition(strides, "error-strides", "With blocks of other sizes");
  if (has(levels))
    headFigure(cards, "error-by-level", "Which level it comes from", levels, "share", (width, label, here) =>
      barChart(width, label, {
        rows: here.map(({ level, gaussian }) => ({
          label: levelName(level),
          parts: [levelPart(level, gaussian, number)],
        })),
        axis: "nats of resolution and drift together",
      }),
    );
  if (has(tail)) {
    const caption = "Logarithmic; zeros cannot be shown and are left out.";
    headFigure(cards, "error-tail", "Tail from each level on", tail, "tail", drawTail(decay), { caption });
  }
  if (has(decay))
    overview(cards, "error-decay", "Decay ratio between levels, all heads", decay, "ratio", ({ ratio }) => {
      const verdict = isNumber(ratio) && (ratio < 1 ? "the tail shrinks" : "the tail does not shrink");
      return { value: ratio, tip: [`ratio ${number(ratio)}`, verdict] };
    });
  if (has(rows)) {
    const columns = [
      ["KL", "kl"],
      ...ERROR_PARTS.map(([key, name]) => [name, key]),
      ["third cumulant", "third_cumulant_term"],
      ["fourth cumulant", "fourth_cumulant_term"],
      ["total variation", "total_variation"],
    ].map(([head, key]) => [head, (entry) => number(entry[key])]);
    table(place, "All terms", [["", title], ...columns], () => ofHead(rows));
  }
}

const drawTail = (decay) => (width, label, here) => {
  const fit = ofHead(decay ?? [])[0] ?? {};
  const line = (name, paint, dash, points) => {
    const tip = (level, value) => `${name}, ${levelName(level)}: ${number(value)}`;
    return { name, colour: paint, dash, points, tip };
  };
  const series = [
    line(
      "bound",
      "var(--series-0)",
      "6 3",
      here.map((entry) => [entry.level, entry.bound]),
    ),
    line(
      "measured",
      "var(--series-1)",
      "",
      here.map((entry) => [entry.level, entry.measured]),
    ),
  ];
  if (has(fit.terms))
    series.push(
      line(
        "one level",
        "var(--series-2)",
        "2 3",
        fit.terms.map((value, level) => [level, value]),
      ),
    );
  const across = `first level of the tail · fitted ratio ${number(fit.ratio)}`;
  return lineChart(width, label, { log: true, whole: true, across, up: "change of a score", series });
};

function costSection(place) {
  const { levels = [], standard, ratio, whole_ratio: whole } = data.cost;
  const times = [
    isNumber(ratio) && `Score products: ${number(ratio, 4)} times standard attention`,
    isNumber(whole) && `with the values: ${number(whole, 4)} times`,
  ].filter(Boolean);
  if (times.length) place.append(html("p", {}, `${times.join("; ")}.`));
  const cards = grid(place);
  const names = levels.map(({ level }) => ({ name: levelName(level), colour: levelColour(level) }));
  for (const [key, title] of [
    ["flops", "Floating-point operations"],
    ["bytes", "Bytes"],
  ]) {
    const value = standard?.[key];
    const tip = `standard attention: ${compact(value)}`;
    const rows = [
      { label: "standard", parts: [{ value, colour: "var(--series-3)", tip }] },
      { label: "this model", parts: levels.map((entry) => levelPart(entry.level, entry[key], compact)) },
    ].filter((row) => row.parts.some((part) => isNumber(part.value)));
    const draw = (width, label) => barChart(width, label, { rows, names, form: compact });
    if (rows.length) figure(cards, `cost-${key}`, title, draw);
  }
}

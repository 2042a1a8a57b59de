// How far the merged attention is from flat attention, and what it costs.

function errorSection(place) {
  const { rows, strides, levels, tail, decay } = data.error;
  const cards = grid(place);
  const kinds = [
    ["resolution", "resolution", "var(--series-1)"],
    ["drift", "drift", "var(--series-2)"],
    ["non_gaussian", "non-Gaussian", "var(--series-0)"],
  ];
  const names = kinds.map(([, name, paint]) => ({ name, colour: paint }));
  const title = ({ levels_used: used, stride }) =>
    `${used} level${used === 1 ? "" : "s"}${isNumber(stride) ? `, stride ${stride}` : ""}`;
  const decomposition = (list, name, heading) =>
    headFigure(cards, name, heading, list, "decomposition", (width, label, here) => {
      const bars = here.map((entry) => ({
        label: title(entry),
        mark: entry.kl,
        parts: kinds.map(([key, kind, paint]) => ({
          value: entry[key],
          colour: paint,
          tip: lines(
            title(entry),
            `${kind}: ${number(entry[key])} of ${number(entry.kl)}`,
            `total variation ${number(entry.total_variation)}`,
          ),
        })),
      }));
      return barChart(width, label, {
        names,
        rows: bars,
        axis: "nats, mean over queries; the line is the KL",
      });
    });
  if (has(rows)) {
    decomposition(rows, "error-levels", "With more and more levels");
    const own = rows.some((entry) => entry.levels_used === data.meta.levels)
      ? data.meta.levels
      : largest(rows.map((entry) => entry.levels_used));
    const trained = rows.filter((entry) => entry.levels_used === own);
    overview(cards, "error-heads", `KL with ${own} levels, all heads`, trained, "KL", (entry) => ({
      value: entry.kl,
      tip: [`KL ${number(entry.kl)}`, ...kinds.map(([key, kind]) => `${kind} ${number(entry[key])}`)],
    }));
  }
  if (has(strides)) decomposition(strides, "error-strides", "With blocks of other sizes");
  if (has(levels)) {
    headFigure(
      cards,
      "error-by-level",
      "Which level it comes from",
      levels,
      "share",
      (width, label, here) => {
        const bars = here.map(({ level, gaussian }) => ({
          label: levelName(level),
          parts: [
            { value: gaussian, colour: levelColour(level), tip: `${levelName(level)}: ${number(gaussian)}` },
          ],
        }));
        return barChart(width, label, { rows: bars, axis: "nats of resolution and drift together" });
      },
    );
  }
  if (has(tail)) {
    headFigure(
      cards,
      "error-tail",
      "Tail from each level on",
      tail,
      "tail",
      (width, label, here) => {
        const fit = decay?.find((entry) => matches(entry, choice, ["layer", "head"])) ?? {};
        const line = (name, paint, dash, points) => ({
          name,
          colour: paint,
          dash,
          points,
          tip: (level, value) => `${name}, ${levelName(level)}: ${number(value)}`,
        });
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
              "level alone",
              "var(--series-2)",
              "2 3",
              fit.terms.map((value, level) => [level, value]),
            ),
          );
        const across = `first level of the tail · fitted ratio ${number(fit.ratio)}`;
        return lineChart(width, label, { log: true, whole: true, across, up: "change of a score", series });
      },
      { caption: "Logarithmic; zeros have no place on it and are left out." },
    );
  }
  if (has(decay)) {
    overview(cards, "error-decay", "Decay ratio between levels, all heads", decay, "ratio", ({ ratio }) => ({
      value: ratio,
      tip: [
        `ratio ${number(ratio)}`,
        isNumber(ratio) && (ratio < 1 ? "the tail shrinks" : "the tail does not shrink"),
      ],
    }));
  }
  if (has(rows)) {
    const columns = [
      "kl",
      "resolution",
      "drift",
      "non_gaussian",
      "third_cumulant_term",
      "fourth_cumulant_term",
      "total_variation",
    ];
    const heads = [
      "",
      "KL",
      "resolution",
      "drift",
      "non-Gaussian",
      "third cumulant",
      "fourth cumulant",
      "total variation",
    ];
    table(place, "All terms", heads, () =>
      rows
        .filter((entry) => matches(entry, choice, ["layer", "head"]))
        .map((entry) => ({ cells: [title(entry), ...columns.map((key) => number(entry[key]))] })),
    );
  }
}

function costSection(place) {
  const { levels, standard, ratio, whole_ratio: whole } = data.cost;
  const times = [
    isNumber(ratio) && `Score products: ${number(ratio, 4)} times standard attention`,
    isNumber(whole) && `with the values: ${number(whole, 4)} times`,
  ].filter(Boolean);
  if (times.length) place.append(html("p", {}, `${times.join("; ")}.`));
  const cards = grid(place);
  const names = (levels ?? []).map(({ level }) => ({ name: levelName(level), colour: levelColour(level) }));
  for (const [key, title] of [
    ["flops", "Floating-point operations"],
    ["bytes", "Bytes"],
  ]) {
    const piece = (name, value, paint) => ({ value, colour: paint, tip: `${name}: ${compact(value)}` });
    const rows = [
      { label: "standard", parts: [piece("standard attention", standard?.[key], "var(--series-3)")] },
      {
        label: "this model",
        parts: (levels ?? []).map((entry) =>
          piece(levelName(entry.level), entry[key], levelColour(entry.level)),
        ),
      },
    ].filter((row) => row.parts.some(({ value }) => isNumber(value)));
    if (rows.length)
      figure(cards, `cost-${key}`, title, (width, label) =>
        barChart(width, label, { rows, names, form: compact }),
      );
  }
}

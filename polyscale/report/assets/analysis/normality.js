// Mardia's tests of the scores: QQ plots, p-values, and the course of training.

function normalitySection(place) {
  const { levels, over_training: training } = data.normality;
  const shown = () => nearest(levels);
  const p = (value) => (isNumber(value) && value < 1e-4 ? "< 0.0001" : number(value));
  // Two tests at 2.5 % each: together they err in at most 5 %.
  const verdict = ({ skewness_p: skew, kurtosis_p: kurtosis }) => {
    const tests = [skew, kurtosis].filter(isNumber);
    if (!tests.length) return "n/a";
    return tests.some((value) => value < 0.025) ? "not normal" : "no objection";
  };
  if (has(levels)) {
    const cards = grid(place);
    figure(
      cards,
      "normality-qq",
      () => `QQ plot: ${whose(shown())}`,
      (width, label) => {
        const entry = levels.find((one) => matches(one, shown(), ["layer", "head", "level"]));
        if (entry && !has(entry.qq)) return "Too few rows for a QQ plot.";
        if (!entry) return noneFor(levels, shown(), "QQ plot");
        const tip = (theory, sample) => lines(`expected ${number(theory)}`, `found ${number(sample)}`);
        const series = [{ colour: "var(--series-1)", line: false, points: entry.qq, tip }];
        return lineChart(width, label, {
          diagonal: true,
          across: `chi-square quantile, ${entry.dimensions} dimensions`,
          up: "squared distance in the sample",
          series,
        });
      },
    );
    overview(
      cards,
      "normality-overview",
      "Mardia's skewness, all heads",
      levels,
      "test",
      (entry) => ({
        value: entry.skewness,
        tip: [
          `skewness ${number(entry.skewness)}, p ${p(entry.skewness_p)}`,
          `kurtosis ${number(entry.kurtosis)}, p ${p(entry.kurtosis_p)}`,
          verdict(entry),
        ],
      }),
      { level: () => shown().level },
    );
    const heads = ["level", "n", "dimensions", "skewness", "p", "kurtosis", "if normal", "p", "at 5 %"];
    table(place, "Mardia's tests for the chosen head", heads, () =>
      levels
        .filter((entry) => matches(entry, choice, ["layer", "head"]))
        .map((entry) => ({
          chosen: entry.level === shown().level,
          cells: [
            levelName(entry.level),
            number(entry.n, 6),
            number(entry.dimensions),
            number(entry.skewness),
            p(entry.skewness_p),
            number(entry.kurtosis),
            number(entry.kurtosis_expected),
            p(entry.kurtosis_p),
            verdict(entry),
          ],
        })),
    );
  }
  const more = grid(place);
  for (const key of has(training) ? ["skewness", "kurtosis"] : []) {
    figure(
      more,
      `normality-${key}-over-training`,
      () => `${key} over training: ${layerName(choice.layer)}`,
      (width, label) => {
        const here = training
          .filter((entry) => matches(entry, choice, ["layer"]))
          .sort((a, b) => a.step - b.step);
        if (!here.length) return `Nothing recorded for ${layerName(choice.layer)}.`;
        const series = unique(here.map((entry) => entry.level)).map((level, index) => ({
          name: levelName(level),
          colour: levelColour(isNumber(level) ? level : index),
          dash: ["", "6 3", "2 3", "8 3 2 3"][index % 4],
          points: here.filter((entry) => entry.level === level).map((entry) => [entry.step, entry[key]]),
          tip: (step, value) => `${levelName(level)}, step ${step}: ${number(value)}`,
        }));
        const normal = here
          .filter((entry) => key === "kurtosis" && isNumber(entry.kurtosis_expected))
          .map((entry) => [entry.step, entry.kurtosis_expected]);
        if (has(normal))
          series.push({
            name: "if normal",
            colour: "var(--soft)",
            dash: "1 3",
            points: normal,
            tip: (_, value) => `a normal sample: ${number(value)}`,
          });
        return lineChart(width, label, { across: "training step", up: key, series });
      },
    );
  }
}

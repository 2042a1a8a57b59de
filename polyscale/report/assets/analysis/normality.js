// Mardia's tests of the scores: QQ plots, p-values, and the course of training.

const pValue = (value) => (isNumber(value) && value < 1e-4 ? "< 0.0001" : number(value));
// Two tests at 2.5 % each: together they err in at most 5 %.
const normalityVerdict = ({ skewness_p: skewness, kurtosis_p: kurtosis }) => {
  const tests = [skewness, kurtosis].filter(isNumber);
  if (!tests.length) return "n/a";
  return tests.some((value) => value < 0.025) ? "not normal" : "no objection";
};

function normalitySection(place) {
  const { levels, over_training: training } = data.normality;
  if (has(levels)) normalityTests(place, levels);
  if (!has(training)) return;
  const cards = grid(place);
  for (const key of ["skewness", "kurtosis"]) {
    const title = () => `${key} over training: ${layerName(choice.layer)}`;
    figure(cards, `normality-${key}-over-training`, title, drawTraining(training, key));
  }
}

function normalityTests(place, levels) {
  const shown = () => nearest(levels);
  const cards = grid(place);
  const title = () => `QQ plot: ${whose(shown())}`;
  figure(cards, "normality-qq", title, (width, label) => {
    const entry = levels.find((one) => matches(one, shown()));
    if (!entry) return noneFor(levels, shown(), "QQ plot");
    if (!has(entry.qq)) return "Too few rows for a QQ plot.";
    const tip = (theory, sample) => lines(`expected ${number(theory)}`, `found ${number(sample)}`);
    const series = [{ colour: "var(--series-1)", line: false, points: entry.qq, tip }];
    const across = `chi-square quantile, ${entry.dimensions} dimensions`;
    return lineChart(width, label, { diagonal: true, across, up: "squared distance in the sample", series });
  });
  const describe = (entry) => ({
    value: entry.skewness,
    tip: [
      `skewness ${number(entry.skewness)}, p ${pValue(entry.skewness_p)}`,
      `kurtosis ${number(entry.kurtosis)}, p ${pValue(entry.kurtosis_p)}`,
      normalityVerdict(entry),
    ],
  });
  const level = () => shown().level;
  overview(cards, "normality-overview", "Mardia's skewness, all heads", levels, "test", describe, { level });
  const columns = [
    ["level", (entry) => levelName(entry.level)],
    ["n", (entry) => number(entry.n, 6)],
    ["dimensions", (entry) => number(entry.dimensions)],
    ["skewness", (entry) => number(entry.skewness)],
    ["p", (entry) => pValue(entry.skewness_p)],
    ["kurtosis", (entry) => number(entry.kurtosis)],
    ["if normal", (entry) => number(entry.kurtosis_expected)],
    ["p", (entry) => pValue(entry.kurtosis_p)],
    ["at 5 %", normalityVerdict],
  ];
  const chosen = (entry) => entry.level === level();
  table(place, "Mardia's tests for the chosen head", columns, () => ofHead(levels), chosen);
}

const drawTraining = (training, key) => (width, label) => {
  const here = training.filter((entry) => matches(entry, choice, ["layer"]));
  here.sort((a, b) => a.step - b.step);
  if (!here.length) return `Nothing recorded for ${layerName(choice.layer)}.`;
  const series = unique(here.map((entry) => entry.level)).map((level, index) => ({
    name: levelName(level),
    colour: levelColour(isNumber(level) ? level : index),
    dash: ["", "6 3", "2 3", "8 3 2 3"][index % 4],
    points: here.filter((entry) => entry.level === level).map((entry) => [entry.step, entry[key]]),
    tip: (step, value) => `${levelName(level)}, step ${step}: ${number(value)}`,
  }));
  const known = here.filter((entry) => key === "kurtosis" && isNumber(entry.kurtosis_expected));
  const tip = (_, value) => `a normal sample: ${number(value)}`;
  // Levels tested in different dimensions have different expected values, each a line of its own.
  unique(known.map((entry) => entry.kurtosis_expected)).forEach((value, index) => {
    const same = known.filter((entry) => entry.kurtosis_expected === value);
    const points = unique(same.map((entry) => entry.step)).map((step) => [step, value]);
    series.push({ name: index ? "" : "if normal", colour: "var(--soft)", dash: "1 3", points, tip });
  });
  return lineChart(width, label, { across: "training step", up: key, series });
};

// The detectors, number for number those of dlm_lens.sinks: float64 arithmetic, a float32 threshold.

const RULES = {
  "above-mean": { setting: "eps", start: 3, words: (v) => `AboveMean(eps=${v}): score > mean of the others + ${v}` },
  "above-std": { setting: "k", start: 3, words: (v) => `AboveStd(k=${v}): score > mean + ${v} standard deviations` },
  "top-k": { setting: "k", start: 1, words: (v) => `TopK(k=${v}): the ${v} keys that receive most` },
};

function threshold(recorded, place, score, rule) {
  const { total, defined, std } = recorded;
  if (rule.name === "above-mean") {
    const others = defined[place] - 1;
    return others < 1 ? NaN : Math.fround((total[place] - score) / others + rule.value);
  }
  const mean = total[place] / defined[place];
  if (std[place] <= 1e-6 * Math.abs(mean)) return NaN;
  return Math.fround(mean + rule.value * std[place]);
}

// The sinks of a pattern at a step, highest first: {key, score, threshold}.
function sinksOf(recorded, pattern, step, rule) {
  const found = recorded.strongest(pattern, step);
  if (rule.name === "top-k") return found.slice(0, rule.value).map((entry) => ({ ...entry, threshold: NaN }));
  const place = pattern * recorded.steps + step;
  const sinks = [];
  for (const entry of found) {
    const level = threshold(recorded, place, entry.score, rule);
    // Lower scores have higher thresholds: behind the first that fails, all fail.
    if (!(entry.score > level)) break;
    sinks.push({ ...entry, threshold: level });
  }
  return sinks;
}

// Whether all sinks by this rule are among the exactly known keys of every pattern.
function findsAll(recorded, rule) {
  const limit = recorded.about.exact.limits[rule.name];
  if (limit === null) return true;
  return rule.name === "top-k" ? rule.value <= limit : rule.value >= limit;
}

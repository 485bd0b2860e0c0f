// The sections of a run, in the order of the page. Each returns nothing where the run has no data for it.

// What the slider moves through: the points of the path, or the epochs of a run that leaves none.
function momentsOf(run) {
  const p = run.points, m = run.metrics, own = p.point?.length, n = own || m.epoch?.length || 0;
  const epoch = own ? p.point : m.epoch ?? [];
  const row = new Map((m.epoch ?? []).map((e, i) => [e, i]));
  const column = (name, other) => Array.from({ length: n }, (_, k) =>
    (own ? p[other ?? name]?.[k] : null) ?? m[name]?.[row.get(epoch[k])] ?? null);
  const groups = run.layers.reduce((sum, l) => sum + l.groups, 0), parameters = run.layers.reduce((sum, l) => sum + l.parameters, 0);
  const share = (weight, total) => Array.from({ length: n }, (_, k) => total ? run.layers.reduce((sum, l) => sum + weight(l, k), 0) / total : null);
  return {
    count: n, epoch, time: column("time"), lam: column("lam"), loss: column("loss"), dense: column("dense"), sparse: column("sparse"),
    selected: Array.from({ length: n }, (_, k) => run.layers.reduce((sum, l) => sum + l.kept[k], 0)), groups, parameters,
    keep: run.layers.length ? share((l, k) => l.kept[k], groups) : column("keep"),
    share: share((l, k) => l.parameters * l.kept[k] / l.groups, parameters),
  };
}

const READOUTS = [["epoch", "epoch"], ["time", "path time"], ["lam", "λ"], ["keep", "groups kept"], ["share", "parameters kept"], ["dense", "dense accuracy"], ["sparse", "sparse accuracy"]];
const AS_PERCENT = new Set(["keep", "share", "dense", "sparse"]);
const said = (name, value) => AS_PERCENT.has(name) ? percent(value) : number(value);

function solutionPath(view) {
  if (!view.run.layers.length) return null;
  const scaled = view.run.layers.some(l => l.kind === "weight");
  return section("path", "Solution path",
    el("p", { class: "lead" }, "A line is the norm of a group: ", el("strong", { class: "blue" }, "blue while it is in the support of Γ"),
      ", ", el("strong", { class: "greyed" }, "grey while it is not"), ". Γ selects; W trains as usual. Click into a figure, or move the slider.",
      scaled ? " Of layers where every weight is a group, quantiles of all weights: 1–99 %, 5–95 %, 25–75 % and the median." : ""),
    el("div", { class: "grid" }, view.run.layers.map(layer => layerCard(view, layer))));
}

function selectedNetwork(view) {
  const { run, moments } = view;
  if (!run.layers.length) return null;
  const common = { run, points: view.points, quantiles: view.quantiles, k: view.k };
  const scaling = run.scaling === true ? "with magnitude scaling" : run.scaling === false ? "without magnitude scaling" : null;
  return section("selected", "What is selected",
    el("div", { class: "grid broad" }, keepBars(view), structure(view),
      boxes("‖V‖ by layer", { ...common, which: "v", id: "norms-v", lam: k => moments.lam[k],
        note: `${scaling ? `This run is trained ${scaling}. ` : ""}The middle half as a box, 5–95 % as a line; dashed, the threshold λ that ‖V‖ must pass.` }),
      boxes("‖W‖ by layer", { ...common, which: "w", id: "norms-w", note: "Of the weights themselves, on the same scale at all moments." })));
}

// Lines over the run, with their values at the moment.
function curves(view, title, id, lines, { percent: percents, note, range, extra } = {}) {
  const { run } = view, m = lines[0].from === "points" ? { x: view.x, length: view.points } : { x: () => view.metricsX(), length: run.metrics.epoch?.length ?? 0 };
  const shownLines = lines.filter(l => l.values?.some(known));
  if (!shownLines.length) return null;
  const series = shownLines.map(l => ({ ...l, dash: l.dash ?? [], points: m.length === 1 }));
  const outs = [];
  const chart = new Chart({ label: `${title} over the run: ${series.map(s => s.label).join(", ")}`, x: m.x, series, y: { percent: percents, range }, clock: view.clock, pick: view.pick });
  const keys = legend(series, outs);
  const format = percents ? percent : number;
  view.moving.push(k => series.forEach((s, i) => { tell(outs[i], format(s.values[view.index(s.from, k)])); }));
  const epochs = lines[0].from === "points" ? run.points.point : run.metrics.epoch;
  return figure(title, { id, note, name: `${run.name}-${id}`, extra,
    rows: () => [["epoch", ...series.map(s => s.label)], ...epochs.map((e, i) => [e, ...series.map(s => s.values[i])])] }, keys, chart.host);
}

function training(view) {
  const { run, moments } = view, m = run.metrics, from = m.epoch?.length ? "metrics" : "points";
  const of = name => from === "metrics" ? m[name] : run.points[name];
  const cards = [
    curves(view, "Accuracy", "accuracy", [
      { label: "dense (W)", values: of("dense"), colour: "orange", from },
      { label: "sparse (W where Γ ≠ 0)", values: of("sparse"), colour: "blue", dash: [6, 3], from }], { percent: true }),
    curves(view, "Loss", "loss", [
      { label: "training", values: of("loss"), colour: "orange", from },
      { label: "test", values: of("test_loss"), colour: "blue", dash: [6, 3], from }]),
    run.layers.length ? curves(view, "Groups kept", "kept", [{ label: "keep", values: moments.keep, colour: "blue", from: "points" }], { percent: true }) : null,
    run.points.lam ? curves(view, "Threshold λ", "lambda", [{ label: "λ", values: run.points.lam, colour: "ink", from: "points" }]) : null,
    curves(view, "Learning rate", "rate", [{ label: "lr", values: of("lr"), colour: "ink", from }]),
  ].filter(Boolean);
  return cards.length ? section("training", "Training", el("div", { class: "grid" }, cards)) : null;
}

function pruning(view) {
  const { run } = view, found = run.pruned;
  if (!found) return null;
  const batches = [...new Set(found.rows.flatMap(r => Object.keys(r.latency ?? {})))];
  const rows = [["network", "accuracy", "parameters", "non-zero", "MACs", "bytes", ...batches.flatMap(b => [`ms at ${b}`, `speed at ${b}`])],
    ...found.rows.map(r => [r.network, percent(r.accuracy), ...[r.parameters, r.nonzero, r.macs, r.bytes],
      ...batches.flatMap(b => [r.latency?.[b] ? Number((1e3 * r.latency[b].seconds).toPrecision(3)) : "–", r.latency?.[b] ? `${r.latency[b].ratio.toFixed(2)}×` : "–"])])];
  const cards = [figure("Dense, selected, shrunk, trained", { id: "pruned", name: `${run.name}-pruned`, rows: () => rows, tableRows: null, wide: true,
    note: `From epoch ${number(found.epoch)} of ${found.run}: ${percent(found.selection.kept)} of the groups kept, at the level of ${found.selection.level}s.` },
  scrolling("Networks before and after pruning", table(rows[0], rows.slice(1))))];
  if (run.selection) {
    cards.push(widths("Pruned inside dense", run.selection, { id: "pruned-structure", name: `${run.name}-pruned-structure`,
      note: "What this network kept of the one that it was made from; × where nothing is left.",
      rows: () => [["layer", "dense width", "width"], ...run.selection.map(l => [l.name, l.width, l.wide || "dropped"])] }));
  }
  return section("pruning", "Pruning", el("div", { class: "grid broad" }, cards));
}

function provenance(view) {
  const { run } = view, env = run.environment;
  if (!run.folder) return null;
  const plain = Object.entries(env).filter(([, v]) => v === null || typeof v !== "object").map(([k, v]) => [k, v ?? "–"]);
  const resumed = (env.resumed ?? []).map(r => [r.started ?? "–", r.command ?? "–"]);
  const changed = Object.entries(run.config).filter(([name, value]) => value !== run.defaults[name]).map(([name, value]) => [name, value, run.defaults[name]]);
  return section("provenance", "How to repeat it",
    el("h3", {}, "Command"), el("pre", { tabindex: 0, "aria-label": "Command" }, env.command || "not recorded"),
    resumed.length ? scrolling("Resumed", table(["resumed", "command"], resumed)) : null,
    el("div", { class: "grid broad" },
      el("div", { class: "card" }, el("h3", {}, "Configuration"),
        el("p", { class: "note" }, `What is other than the default: ${changed.length} of ${Object.keys(run.config).length} settings.`),
        scrolling("Configuration", table(["setting", "value", "default"], changed)),
        el("details", { class: "whole" }, el("summary", {}, "All of them: config.toml"), el("pre", { tabindex: 0, "aria-label": "config.toml" }, run.toml))),
      el("div", { class: "card" }, el("h3", {}, "Environment"), scrolling("Environment", table(["what", "value"], plain)))));
}

// How a network grew: its widths over time, why it did, and what accuracy cost in parameters.

const ENDS = { growths: "as many growths as were asked for", budget: "the budget is used up", epochs: "the epochs are used up", "flat loss": "the loss became flat" };

// One line a stream: the layers that share its channels have one width.
function growth(view) {
  const { run } = view, found = run.growth;
  if (!found?.stages.length) return null;
  const { stages, settings } = found, epochs = stages.map(s => s.epoch);
  const streams = found.streams.map(layers => layers[0]), layers = Object.keys(stages[0].widths);
  // Up to the epoch of a stage the network has its widths; then come those of the next.
  const series = streams.map((name, i) => ({
    label: shown(name), ...depth(i, streams.length), stepped: true, values: [...stages, stages.at(-1)].map(s => s.widths[name]),
  }));
  const chart = new Chart({ label: `Widths over the epochs: ${series.map(s => s.label).join(", ")}`, height: 240, x: () => [0, ...epochs], series });
  const keys = series.length > SERIES.length
    ? legend([{ ...series[0], label: `${series[0].label} (first)` }, { ...series.at(-1), label: `${series.at(-1).label} (last)` }]) : legend(series);
  const grew = s => Object.values(s.grew).reduce((a, b) => a + b, 0);
  const stageRows = [["epoch", "parameters", "MACs", "accuracy", "loss", "seconds", "new filters"],
    ...stages.map(s => [s.epoch, s.parameters, s.macs, percent(s.accuracy), number(s.loss), Number(s.seconds.toPrecision(4)), grew(s)])];
  const decided = (s, name) => known(s.ratios[name]) ? `${percent(s.ratios[name], 0)}${s.grew[name] ? ` +${s.grew[name]}` : ""}` : s.grew[name] ? `+${s.grew[name]}` : "–";
  const decisions = [["layer", ...epochs.map(e => `epoch ${e}`)], ...streams.map(name => [shown(name), ...stages.map(s => decided(s, name))])];
  const why = found.stopped ? `It ended at epoch ${epochs.findLast(e => e <= found.end - settings.then) ?? epochs.at(-1)} (${ENDS[found.stopped] ?? found.stopped}).` : "The network may still grow.";
  return section("growth", "Growth",
    el("p", { class: "lead" }, `From ${whole(stages[0].parameters)} to ${whole(stages.at(-1).parameters)} parameters, decided every ${settings.every} epochs. ${why}`,
      run.layers.length ? " The solution path below is that since the last growth." : ""),
    el("div", { class: "grid broad" },
      figure("Widths over time", { id: "growth-widths", name: `${run.name}-widths`,
        note: series.length > SERIES.length ? "A line a layer, from the first (pale) to the last (strong)." : null,
        rows: () => [["epoch", ...layers], ...stages.map(s => [s.epoch, ...layers.map(l => s.widths[l])])],
        tableRows: () => [["layer", ...epochs.map(e => `epoch ${e}`)], ...layers.map(l => [l, ...stages.map(s => s.widths[l])])] }, keys, chart.host),
      sizes("Accuracy against parameters", { id: "growth-accuracy", name: `${run.name}-growth`, note: "A point for the end of every stage, along the growth." }, [run]),
      figure("Stages", { id: "growth-stages", name: `${run.name}-stages`, tableRows: null,
        rows: () => [["epoch", "parameters", "MACs", "accuracy", "loss", "seconds", "new filters"],
          ...stages.map(s => [s.epoch, s.parameters, s.macs, s.accuracy, s.loss, s.seconds, grew(s)])] },
      scrolling("Stages of the growth", table(stageRows[0], stageRows.slice(1)))),
      figure("Why it grew", { id: "growth-decisions", name: `${run.name}-decisions`, tableRows: null,
        note: `How much of a layer is selected, and the filters that it got; ${settings.policy === "uniform" ? "the control: all layers grow alike" : `a layer grows above τ = ${typeof settings.tau === "number" ? number(settings.tau) : Object.entries(settings.tau).map(([k, v]) => `${v} (${k})`).join(", ")}`}.`,
        rows: () => [["layer", "epoch", "ratio", "new filters"], ...streams.flatMap(name => stages.map(s => [name, s.epoch, s.ratios[name], s.grew[name] ?? 0]))] },
      scrolling("Decisions of the growth", table(decisions[0], decisions.slice(1))))));
}

// Layers in the order of their depth: few have a style each, many are shades of one colour.
const depth = (i, count) => count > SERIES.length ? { colour: "blue", shade: i / (count - 1), dash: [] } : style(i);

// Accuracy against parameters along the growth of networks.
function sizes(title, options, runs, lasting = false) {
  const stages = runs.flatMap((run, i) => run.growth.stages.map(stage => ({ ...stage, run, i }))).sort((a, b) => a.parameters - b.parameters || a.epoch - b.epoch);
  const xs = stages.map(s => s.parameters), room = (xs.at(-1) - xs[0] || xs[0]) * 0.05;
  const series = runs.map((run, i) => ({ label: run.name, ...style(i), points: true, values: stages.map(s => s.i === i ? s.accuracy : null) }));
  const chart = new Chart({ label: `${title}: ${runs.map(r => r.name).join(", ")}`, height: 240, lasting, x: () => xs, xRange: [xs[0] - room, xs.at(-1) + room], xText: short, series, y: { percent: true } });
  const rows = () => [["run", "epoch", "parameters", "MACs", "accuracy"], ...runs.flatMap(r => r.growth.stages.map(s => [r.name, s.epoch, s.parameters, s.macs, s.accuracy]))];
  return figure(title, { ...options, rows }, legend(series), chart.host);
}

// What several runs have: their differences, their curves beside each other; tickets.

const style = i => ({ colour: SERIES[i % SERIES.length][0], dash: SERIES[i % SERIES.length][1] });
const withoutNull = parts => parts.filter(part => part !== null);

function comparisonOfRuns(data) {
  const { runs } = data;
  if (runs.length < 2) return null;
  const curve = (title, id, of) => {
    const found = runs.map((r, i) => ({ run: r, points: of(r), ...style(i) })).filter(r => r.points.y.some(known));
    if (!found.length) return null;
    // One axis for all: the epochs that any of them has.
    const x = [...new Set(found.flatMap(f => f.points.x))].sort((a, b) => a - b), place = new Map(x.map((e, i) => [e, i]));
    const series = found.map(f => {
      const values = new Array(x.length).fill(null);
      f.points.x.forEach((e, i) => { values[place.get(e)] = f.points.y[i]; });
      return { label: f.run.name, values, colour: f.colour, dash: f.dash };
    });
    const chart = new Chart({ label: `${title} of ${series.map(s => s.label).join(", ")}`, height: 200, x: () => x, series, y: { percent: true }, lasting: true });
    return figure(title, { id, name: `runs-${id}`, rows: () => [["epoch", ...series.map(s => s.label)], ...x.map((e, i) => [e, ...series.map(s => s.values[i])])] }, legend(series), chart.host);
  };
  const metric = name => r => r.metrics.epoch?.length ? { x: r.metrics.epoch, y: r.metrics[name] ?? [] } : { x: r.points.point ?? [], y: r.points[name] ?? [] };
  const ofKeep = r => r.layers.length ? { x: r.points.point, y: momentsOf(r).keep } : metric("keep")(r);
  const spread = runs.filter(r => r.layers.length).map((run, i) => boxes(`‖V‖ by layer: ${run.name}, ${run.scaling ? "with" : "without"} magnitude scaling`, {
    run, points: run.points.point.length, quantiles: data.quantiles, which: "v", id: `norms-of-${i}`, k: () => run.points.point.length - 1, lam: () => run.points.lam.at(-1),
    note: "At the end of the path. Magnitude scaling brings ‖V‖ of all layers to one scale." }));
  const grown = runs.filter(r => r.growth?.stages.length);
  return section("runs", "Runs compared",
    el("div", { class: "grid broad" }, withoutNull([differences(runs), outcomes(runs), curve("Dense accuracy", "dense-compared", metric("dense")),
      curve("Sparse accuracy", "sparse-compared", metric("sparse")), curve("Groups kept", "keep-compared", ofKeep),
      grown.length > 1 ? sizes("Accuracy against parameters", { id: "growth-compared", name: "runs-growth" }, grown, true) : null, ...spread])));
}

// The settings in which runs differ; marked where one is not that of the first run.
function differences(runs) {
  const configured = runs.filter(r => Object.keys(r.config).length), fields = Object.keys(configured[0]?.config ?? {});
  const differing = fields.filter(f => configured.some(r => r.config[f] !== configured[0].config[f]));
  const rows = () => [["setting", ...configured.map(r => r.name)], ...fields.map(f => [f, ...configured.map(r => r.config[f])])];
  if (configured.length < 2) return null;
  const body = differing.map(f => el("tr", {}, el("th", { scope: "row" }, f), configured.map(r =>
    el("td", { class: r.config[f] !== configured[0].config[f] && "other" }, r.config[f] !== configured[0].config[f] ? el("strong", {}, r.config[f]) : r.config[f]))));
  return figure("Configurations", { id: "differences", name: "runs-configurations", rows, wide: true,
    note: differing.length ? `${differing.length} of ${fields.length} settings differ; marked: other than in ${configured[0].name}.` : "The configurations are the same." },
  scrolling("Differences of the configurations", el("table", {}, el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "setting"), configured.map(r => el("th", { scope: "col" }, r.name)))), el("tbody", {}, body))));
}

function outcomes(runs) {
  const rows = [["run", "status", "epochs", "dense accuracy", "sparse accuracy", "groups kept", "parameters kept"], ...runs.map(r => {
    const m = momentsOf(r), last = name => m[name].findLast(known);
    return [r.name, r.status || "–", number(m.epoch.at(-1)), percent(last("dense")), percent(last("sparse")), percent(last("keep")), percent(last("share"))];
  })];
  return figure("In the end", { id: "outcomes", name: "runs-outcomes", wide: true, rows: () => rows, tableRows: null }, scrolling("Runs in the end", table(rows[0], rows.slice(1))));
}

// A comparison of tickets: accuracy against what is kept, by method, and what it took to find them.
function tickets(comparison, number_) {
  const { grid, rows: all } = comparison, id = `tickets-${number_}`;
  const pruned = all.filter(r => r.method !== "dense"), dense = all.find(r => r.method === "dense");
  const keeps = [...new Set(pruned.map(r => r.keep))].sort((a, b) => a - b), methods = grid.methods.filter(m => pruned.some(r => r.method === m));
  const cell = (m, keep) => pruned.find(r => r.method === m && r.keep === keep);
  const series = methods.map((m, i) => ({ label: m, ...style(i), points: true, values: keeps.map(k => cell(m, k)?.mean ?? null) }));
  const ends = all.flatMap(r => [r.mean - (r.sd ?? 0), r.mean + (r.sd ?? 0)]);
  const low = Math.min(...ends), high = Math.max(...ends), room = (high - low || 0.01) * 0.06;
  const chart = new Chart({
    label: `Accuracy against the fraction kept: ${methods.join(", ")}`, height: 300, x: () => keeps, xTicks: keeps, series, lasting: true,
    y: { percent: true, range: () => [low - room, high + room] },
    paint: plot => paintErrors(plot, methods.map((m, i) => ({ ...style(i), rows: keeps.map(k => cell(m, k)).filter(Boolean), aside: i - (methods.length - 1) / 2 })), dense),
  });
  const said = r => r ? `${(100 * r.mean).toFixed(2)}${known(r.sd) ? ` ± ${(100 * r.sd).toFixed(2)}` : ""}` : "–";
  const pivot = [["keep", ...methods, ...(dense ? ["dense"] : [])], ...keeps.map(k => [percent(k), ...methods.map(m => said(cell(m, k))), ...(dense ? [said(dense)] : [])])];
  const raw = () => [["method", "keep", "seeds", "mean", "sd", "difference", "difference sd", "epoch found", "cost (dense trainings)", "MACs to find", "layers emptied"],
    ...all.map(r => [r.method, r.keep, r.seeds, r.mean, r.sd, r.difference, r.difference_sd, r.at, r.cost, r.macs, r.emptied])];
  // Only where the grid has the method that the others are paired with.
  const paired = all.some(r => known(r.difference));
  const difference = r => known(r.difference) ? `${r.difference >= 0 ? "+" : "−"}${Math.abs(100 * r.difference).toFixed(2)}${known(r.difference_sd) ? ` ± ${(100 * r.difference_sd).toFixed(2)}` : ""}` : "–";
  const costs = [["method", "keep", "accuracy", ...(paired ? ["difference"] : []), "found at epoch", "cost", "MACs"], ...all.map(r => [
    r.method, percent(r.keep), said(r), ...(paired ? [difference(r)] : []), number(r.at), known(r.cost) ? r.cost.toFixed(2) : "–", short(r.macs)])];
  const on = `${grid.search.model} on ${grid.search.data}`;
  return section(id, `Tickets: ${comparison.name}`,
    el("p", { class: "lead" }, `${on}, ${grid.seeds.length} seed${grid.seeds.length > 1 ? "s" : ""}, trained for ${grid.epochs} epochs`,
      comparison.missing ? `; ${comparison.missing} cells are still to be done.` : ".", " Accuracies in %, with the standard deviation over seeds."),
    el("div", { class: "grid broad" },
      figure("Accuracy against keep", { id: `${id}-accuracy`, name: `${comparison.name}-accuracy`, rows: raw, wide: true, tableRows: () => pivot,
        note: dense ? "The dotted line and its band are the dense network." : null }, legend(series), chart.host),
      figure(grid.source ? `Transfer: tickets found on ${grid.source}, trained on ${grid.search.data}` : "By fraction and method",
        { id: `${id}-table`, name: `${comparison.name}-table`, rows: () => pivot, tableRows: null, wide: true },
        scrolling("Accuracy by fraction and method", table(pivot[0], pivot.slice(1)))),
      figure("What it took", { id: `${id}-costs`, name: `${comparison.name}-costs`, rows: raw, tableRows: null, wide: true,
        note: `${paired ? `Difference: to ${grid.reference} at the same fraction, paired by seed. ` : ""}Cost: to find the ticket, in units of one dense training.` },
      scrolling("What it took", table(costs[0], costs.slice(1))))));
}

function paintErrors(plot, drawn, dense) {
  const { ctx, bbox } = plot, ratio = devicePixelRatio;
  ctx.save();
  if (dense) {
    const y = plot.valToPos(dense.mean, "y", true), top = plot.valToPos(dense.mean + (dense.sd ?? 0), "y", true);
    ctx.fillStyle = ctx.strokeStyle = colours.muted;
    ctx.globalAlpha = 0.12;
    ctx.fillRect(bbox.left, top, bbox.width, 2 * (y - top));
    ctx.globalAlpha = 1;
    ctx.setLineDash([2 * ratio, 3 * ratio]);
    ctx.beginPath();
    ctx.moveTo(bbox.left, y);
    ctx.lineTo(bbox.left + bbox.width, y);
    ctx.stroke();
    ctx.setLineDash([]);
  }
  ctx.lineWidth = 1.5 * ratio;
  for (const { colour, rows, aside } of drawn) {
    ctx.strokeStyle = colours[colour];
    for (const row of rows.filter(r => r.sd)) {
      // Bars beside each other, not on top of each other.
      const x = plot.valToPos(row.keep, "x", true) + aside * 3 * ratio, ends = [row.mean - row.sd, row.mean + row.sd].map(v => plot.valToPos(v, "y", true));
      ctx.beginPath();
      ctx.moveTo(x, ends[0]);
      ctx.lineTo(x, ends[1]);
      for (const y of ends) { ctx.moveTo(x - 3 * ratio, y); ctx.lineTo(x + 3 * ratio, y); }
      ctx.stroke();
    }
  }
  ctx.restore();
}

// The solution path of a layer: a line a group, in colour while the group is in the support. Figure 1 of the paper.

// Lines over x: `values` holds one group after the other; `support` says where they are selected.
function paintLines(plot, values, support, count, points, x) {
  const { ctx, bbox } = plot, ratio = devicePixelRatio;
  const xs = Float32Array.from(x, value => plot.valToPos(value, "x", true));
  const { min, max } = plot.scales.y, bottom = bbox.top + bbox.height, scale = bbox.height / (max - min);
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  ctx.lineWidth = ratio * (count > 100 ? 0.75 : 1.1);
  ctx.lineJoin = "bevel";
  for (const selected of [0, 1]) {
    ctx.strokeStyle = selected ? colours.blue : colours.grey;
    // The fewer, the stronger: a handful that is selected among hundreds must be seen.
    let many = 0;
    for (let g = 0; g < count; g++) many += support.subarray(g * points + 1, (g + 1) * points).includes(selected);
    ctx.globalAlpha = Math.min(0.85, Math.max(0.14, 5 / Math.sqrt(many)));
    for (let g = 0; g < count; g++) {
      let pen = false, any = false;
      ctx.beginPath();
      for (let k = 1, i = g * points + 1; k < points; k++, i++) {
        if (support[i] !== selected || values[i] !== values[i] || values[i - 1] !== values[i - 1]) { pen = false; continue; }
        if (!pen) ctx.moveTo(xs[k - 1], bottom - (values[i - 1] - min) * scale);
        ctx.lineTo(xs[k], bottom - (values[i] - min) * scale);
        pen = any = true;
      }
      if (any) ctx.stroke();
    }
  }
  ctx.restore();
}

// Quantiles over x, where every weight is a group: 5-95 %, 25-75 % and the median.
function paintFan(plot, values, levels, points, x, colour) {
  const { ctx, bbox } = plot;
  const xs = x.map(value => plot.valToPos(value, "x", true));
  const y = (level, k) => plot.valToPos(values[levels.indexOf(level) * points + k], "y", true);
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  ctx.fillStyle = ctx.strokeStyle = colour;
  for (const [low, high, alpha] of [[0.01, 0.99, 0.12], [0.05, 0.95, 0.18], [0.25, 0.75, 0.3]]) {
    ctx.globalAlpha = alpha;
    ctx.beginPath();
    xs.forEach((px, k) => k ? ctx.lineTo(px, y(high, k)) : ctx.moveTo(px, y(high, k)));
    for (let k = points - 1; k >= 0; k--) ctx.lineTo(xs[k], y(low, k));
    ctx.fill();
  }
  ctx.globalAlpha = 1;
  ctx.lineWidth = 1.5 * devicePixelRatio;
  ctx.beginPath();
  xs.forEach((px, k) => k ? ctx.lineTo(px, y(0.5, k)) : ctx.moveTo(px, y(0.5, k)));
  ctx.stroke();
  ctx.restore();
}

const NORMS = [["gamma", "Γ"], ["w", "W"]];

// The card of a layer: ‖Γ‖ above ‖W‖, and how much is selected at the moment.
function layerCard(view, layer) {
  const { run, points, quantiles } = view, n = points;
  const single = layer.kind === "weight", letter = single ? (s => `|${s}|`) : (s => `‖${s}‖`);
  const kept = el("output", { class: "kept", "aria-live": "off" });
  const plots = NORMS.map(([which, symbol]) => new Chart({
    label: `${letter(symbol)} of ${layer.name} along the path: ${single ? "quantiles of all weights" : `${layer.groups} lines, one a group`}`,
    height: 122,
    x: view.x,
    series: [{ label: symbol, values: new Array(n).fill(null), hidden: true }],
    y: { range: () => [0, (single ? view.fanTop(layer, which) : layer.tops[which]) * 1.04 || 1] },
    clock: view.clock,
    pick: view.pick,
    before: () => unpack(layer, n, quantiles.length),
    paint: plot => {
      if (!layer.w) return;
      if (single) paintFan(plot, layer[which], quantiles, n, view.x(), which === "gamma" ? colours.blue : colours.muted);
      else paintLines(plot, layer[which], layer.support, layer.groups, n, view.x());
    },
  }));
  const body = NORMS.map(([, symbol], i) => el("div", { class: "norm" }, el("span", { class: "symbol", "aria-hidden": "true" }, letter(symbol)), plots[i].host));
  const card = figure(shown(layer.name), {
    name: `${run.name}-path-${layer.name}`,
    extra: kept,
    ready: () => unpack(layer, n, quantiles.length),
    rows: () => single ? fanRows(view, layer) : lineRows(view, layer),
    tableRows: () => single ? fanRows(view, layer) : nowRows(view, layer),
  }, ...body);
  view.moving.push(k => {
    tell(kept, `${whole(layer.kept[k])} of ${whole(layer.groups)} selected`);
  });
  view.settled.push(() => card.refresh());
  return card;
}

const shown = name => name.replace(/\.weight$/, "");

// All that is known of a layer, a row a group and point.
function lineRows(view, layer) {
  const out = [["epoch", "time", "group", "norm W", "norm V", "norm Gamma", "selected"]];
  const { epoch, time } = view.moments;
  for (let g = 0, i = 0; g < layer.groups; g++) {
    for (let k = 0; k < view.points; k++, i++) {
      out.push([epoch[k], time[k], g, ...[layer.w[i], layer.v[i], layer.gamma[i]].map(rounded), layer.support[i]]);
    }
  }
  return out;
}
function fanRows(view, layer) {
  const names = ["W", "V", "Gamma"].flatMap(s => view.quantiles.map(q => `|${s}| ${Number((100 * q).toFixed(1))} %`));
  return [["epoch", "time", "kept", ...names], ...view.moments.epoch.map((e, k) => [e, view.moments.time[k], layer.kept[k],
    ...["w", "v", "gamma"].flatMap(which => view.quantiles.map((_, q) => rounded(layer[which][q * view.points + k])))])];
}
// The groups at the moment, in the order in which they entered.
function nowRows(view, layer) {
  const k = view.k(), n = view.points, entry = g => layer.entry[g] < 0 ? Infinity : layer.entry[g];
  const order = Array.from({ length: layer.groups }, (_, g) => g).sort((a, b) => entry(a) - entry(b) || layer.v[b * n + n - 1] - layer.v[a * n + n - 1]);
  return [["group", "entered at epoch", "norm W", "norm V", "norm Γ", "selected"], ...order.map(g => [
    g, layer.entry[g] < 0 ? "never" : number(view.moments.epoch[layer.entry[g]]),
    ...["w", "v", "gamma"].map(which => rounded(layer[which][g * n + k])), layer.support[g * n + k] ? "yes" : "no"])];
}
const rounded = value => known(value) ? Number(value.toPrecision(4)) : null;

"use strict";
// What the page was given, and the norms and supports in it as arrays: the inverse of packing.py.

const LEVELS = 4095, MISSING = 65535;

async function inflate(text) {
  const packed = Uint8Array.from(atob(text), c => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// Norms of `groups` groups at `points` points, one group after the other; NaN where they were not finite.
async function decodeNorms(text, top, groups, points) {
  const bytes = await inflate(text), count = groups * points, scale = top / LEVELS;
  const out = new Float32Array(count);
  for (let g = 0, i = 0; g < groups; g++) {
    for (let k = 0, code = 0; k < points; k++, i++) {
      const folded = bytes[i] | (bytes[i + count] << 8);
      code = (code + ((folded >> 1) ^ -(folded & 1))) & 65535;
      out[i] = code === MISSING ? NaN : code * scale;
    }
  }
  return out;
}

// The support, a byte a group and point, laid out like the norms.
async function decodeSupports(text, groups, points) {
  const bytes = await inflate(text), row = Math.ceil(groups / 8);
  const out = new Uint8Array(groups * points);
  for (let g = 0; g < groups; g++) {
    for (let k = 0, state = 0; k < points; k++) {
      state ^= (bytes[k * row + (g >> 3)] >> (g & 7)) & 1;
      out[g * points + k] = state;
    }
  }
  return out;
}

// Unpack a layer once: `layer.w`, `layer.v`, `layer.gamma` and, where there are groups, `layer.support`, `layer.entry`.
function unpack(layer, points, quantiles) {
  layer.ready ??= (async () => {
    const count = layer.kind === "weight" ? quantiles : layer.groups;
    const [w, v, gamma, support] = await Promise.all([
      ...["w", "v", "gamma"].map(n => decodeNorms(layer.norms[n], layer.tops[n], count, points)),
      layer.supports ? decodeSupports(layer.supports, layer.groups, points) : null,
    ]);
    Object.assign(layer, { w, v, gamma, support, norms: null, supports: null });
    if (support) {
      layer.entry = Int32Array.from({ length: layer.groups }, (_, g) =>
        support.subarray(g * points, (g + 1) * points).indexOf(1));
    }
    return layer;
  })();
  return layer.ready;
}

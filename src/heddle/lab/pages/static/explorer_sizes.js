// What a design costs, from the formulas that the parts declare. `DATA` and `FORMULAS` come from Python.
"use strict";
const SUMS = ["parameters", "inactive", "flops", "cached", "recurrent"];
const SINGULAR = { mixers: "mixer", positions: "position", feedforwards: "feedforward", residuals: "residual", norms: "norm", scalings: "scaling" };
const kindOf = (slot, name) => DATA.slots[slot].find(kind => kind.kind === name);
const valueOf = (part, field) => part[field.name] === undefined ? field.default : part[field.name];
const isWord = value => typeof value === "string";
const [REPEAT] = DATA.fields.layer;

// Why a number cannot be a field's, or "".
function outside(field, value) {
  if (!Number.isFinite(value)) return "must be a number";
  if (field.type === "integer" && !Number.isInteger(value)) return "must be a whole number";
  if (field.least !== null && value < field.least) return `must be at least ${field.least}`;
  if (field.most !== null && value > field.most) return `must be at most ${field.most}`;
  if (field.above !== null && value <= field.above) return `must be above ${field.above}`;
  return field.below !== null && value >= field.below ? `must be below ${field.below}` : "";
}

function fieldValues(slot, part, prefix = "", values = {}) {
  for (const field of kindOf(slot, part.kind).kept) if (Array.isArray(part[field.name])) values["count_" + prefix + field.name] = part[field.name].length;
  for (const field of kindOf(slot, part.kind).fields) {
    const value = valueOf(part, field), path = prefix + field.name;
    if (value === false) values["false_" + path] = 1;
    if (value === null || value === undefined || value === false) continue;
    values["has_" + path] = 1;
    if (field.type === "part") {
      values[`is_${path}_${value.kind}`] = 1;
      fieldValues(field.slot, value, path + "_", values);
    } else if (isWord(value)) {
      values[`is_${path}_${value}`] = 1;
      values[path] = value;
    } else values[path] = Number(value);
  }
  return values;
}

// The values of a part with its defaults, as an object that is 0 where it has nothing.
function complete(slot, part, around) {
  const values = { ...fieldValues(slot, part), ...around };
  const v = new Proxy(values, { get: (object, name) => object[name] ?? 0 });
  for (const [name, value] of FORMULAS[slot][part.kind]?.defaults ?? [])
    if (!v["has_" + name]) values[name] = value(v);
  return v;
}

const innerParts = (slot, part) => kindOf(slot, part.kind).fields
  .filter(field => field.type === "part" && field.slot === slot && part[field.name])
  .map(field => [field.name, part[field.name]]);

function costs(slot, part, around) {
  if (part.norm) around = { ...around, ...aroundNorms(part.norm) };
  const formulas = FORMULAS[slot][part.kind];
  const sums = formulas ? formulas.costs(complete(slot, part, around)) : [0, 0, 0, 0, 0];
  for (const [, inner] of innerParts(slot, part)) add(sums, costs(slot, inner, around));
  return sums;
}

const add = (sums, others, count = 1) => others.forEach((value, index) => { sums[index] += value * count; });
// Parameters of a norm: for each element, and beside them.
const aroundNorms = norm => {
  const [none, one] = [0, 1].map(width => FORMULAS.norms[norm.kind].costs(complete("norms", norm, { width }))[0]);
  return { norm_weights: one - none, norm_scalars: none };
};

// [path of a field, sentence] of everything that makes the design invalid.
function refusals(design) {
  const found = [];
  for (const name of ["width", "tokens", "vocab_size"])
    if (!(Number.isSafeInteger(design[name]) && design[name] >= 1)) found.push([name, "must be a whole number above 0"]);
  for (const layer of design.layers) {
    if (outside(REPEAT, layer.count)) found.push(["layers", outside(REPEAT, layer.count)]);
    for (const slot of ["mixers", "feedforwards"])
      if (layer[SINGULAR[slot]]) refusePart(slot, layer[SINGULAR[slot]], design, SINGULAR[slot], found);
  }
  if (isShared(design.layers[0]) && (design.residual.kind === "attention_residuals" || design.residual.first_norm === false))
    found.push(["layers", "visited several times: the first layer has fewer norms or mixes than its later visits"]);
  for (const { mixer } of design.layers) {
    const rotation = mixer?.position, scaling = rotation?.scaling;
    if (!scaling) continue;
    const v = complete("mixers", mixer, surroundings(design, { mixer })), path = "mixer.position.scaling";
    const around = { rotation_dims: rotation.rotary_dim || v.rope_dim || v.head_dim, rotation_base: rotation.base ?? 10000 };
    refusePart("scalings", scaling, design, path, found, around);
  }
  refusePart("residuals", design.residual, design, "residual", found);
  refusePart("norms", design.norm, design, "norm", found);
  const position = design.embedding?.position;
  if (position) {
    refusePart("positions", position, design, "embedding.position", found);
    if (position.kind === "learned" && design.tokens > position.length)
      found.push(["embedding.position", `has ${position.length} positions, and the context is longer; raise length`]);
  }
  return found;
}

function refusePart(slot, part, design, path, found, around = {}) {
  for (const field of kindOf(slot, part.kind).fields) {
    const value = valueOf(part, field), where = `${path}.${field.name}`;
    const missing = value === null || value === undefined;
    if (missing && !field.optional) found.push([where, "is missing; give it"]);
    if (missing || isWord(value) || typeof value === "boolean" || Array.isArray(value)) continue;
    if (field.type === "part") refusePart(field.slot, value, design, where, found);
    else if (outside(field, value)) found.push([where, outside(field, value)]);
  }
  const branches = Math.max(...design.layers.map(branchesOf)), { layers } = below(design, design.layers.length);
  const v = complete(slot, part, { width: design.width, tokens: design.tokens, branches, layers, ...around });
  const from = slot === "scalings" ? path.slice(0, path.lastIndexOf(".")) : path;
  for (const [name, condition, sentence] of FORMULAS[slot][part.kind]?.refusals ?? [])
    if (condition(v) > 0) found.push([`${from}.${name}`, sentence(v)]);
}

const isShared = layer => Boolean(layer.shared) && layer.count > 1;
const branchesOf = layer => (layer.mixer ? 1 : 0) + (layer.feedforward ? 1 : 0);

// How many layers and branches the first entries of a design have.
function below(design, entries) {
  const found = { layers: 0, branches: 0 };
  for (const layer of design.layers.slice(0, entries)) { found.layers += layer.count; found.branches += layer.count * branchesOf(layer); }
  return found;
}

function surroundings(design, layer) {
  const all = below(design, design.layers.length), before = below(design, Math.max(0, design.layers.indexOf(layer)));
  return {
    width: design.width, tokens: design.tokens, branches: branchesOf(layer), dense: layer.feedforward && layer.feedforward.kind !== "moe" ? 1 : 0, ...aroundNorms(design.norm),
    layers: all.layers, all_branches: all.branches, count: layer.count ?? 1, layers_before: before.layers, branches_before: before.branches,
  };
}

// The numbers of the formulas of the embedding and the head.
const aroundLayers = design => ({
  vocab_size: design.vocab_size,
  token_types: design.embedding?.token_types ?? 0,
  embedding_norm: design.embedding?.norm ? 1 : 0,
  head_tied: design.head?.tied === false ? 0 : 1,
  head_bias: design.head?.bias ? 1 : 0,
  head_transform: design.head?.transform ? 1 : 0,
  transform_bias: design.head?.transform_bias ? 1 : 0,
});

// Sums over all layers, and those of each slot of the chosen layer.
function sizes(design, chosen = 0) {
  const sums = [0, 0, 0, 0, 0], slots = {};
  design.layers.forEach((layer, index) => {
    const around = surroundings(design, layer);
    for (const slot of ["mixers", "feedforwards", "residuals"]) {
      const part = slot === "residuals" ? design.residual : layer[SINGULAR[slot]];
      if (!part) continue;
      const own = costs(slot, part, around);
      const weights = isShared(layer) ? 1 : layer.count;
      add(sums, own.slice(0, 2), weights);
      add(sums, [0, 0, ...own.slice(2)], layer.count);
      if (index === chosen) slots[slot] = own;
    }
  });
  const around = surroundings(design, design.layers[0]);
  add(sums, FORMULAS.residuals[design.residual.kind].final(complete("residuals", design.residual, around)));
  const position = design.embedding?.position;
  slots.positions = position ? costs("positions", position, around) : [0, 0, 0, 0, 0];
  slots.norms = costs("norms", design.norm, around);
  add(sums, slots.positions);
  add(sums, FORMULAS.model.costs({ ...around, ...aroundLayers(design) }));
  return { sums, slots };
}

const stateBytes = (sums, design) => sums[3] * design.bytes + sums[4] * 4;
const summary = design => {
  const { sums } = sizes(design);
  // Whole numbers; a rank that follows from a square root may be off by its last bit.
  return { parameters: Math.round(sums[0]), active: Math.round(sums[0] - sums[1]), flops: Math.round(sums[2]), state: stateBytes(sums, design) };
};

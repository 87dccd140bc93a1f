// The choice in an address. It is rebuilt from the fields, kinds, words and ranges in DATA; anything else is ignored, and
// the page shows its initial value there.
"use strict";
const MOST_NESTED = 8;  // parts within parts
const isRecord = value => typeof value === "object" && value !== null && !Array.isArray(value);
const CONTEXT = { name: "tokens", type: "integer", least: 1, most: Number.MAX_SAFE_INTEGER, above: null, below: null };

// The value, if the field can have it.
function allowed(field, value, depth) {
  const isNumber = each => typeof each === "number" && !outside(field, each);
  const isAllowed = {
    integer: isNumber,
    number: isNumber,
    numbers: each => Array.isArray(each) && each.every(isNumber),
    boolean: each => typeof each === "boolean",
    choice: each => field.choices.some(word => each === (({ true: true, false: false })[word] ?? word)),
  };
  if (field.type === "part") return allowedPart(field.slot, value, field.choices, depth + 1);
  return isAllowed[field.type](value) ? value : undefined;
}

// The fields in the order in which they were read; one with another value is as it is in `first`.
function allowedFields(fields, read, first, depth = 0) {
  const found = {};
  for (const [name, value] of Object.entries(read)) {
    const values = fields.filter(field => field.name === name && value !== null).map(field => allowed(field, value, depth) ?? first[name]);
    const known = values.find(each => each !== undefined);
    if (known !== undefined) found[name] = known;
  }
  return found;
}

function allowedPart(slot, read, choices, depth = 0) {
  const kind = isRecord(read) && depth <= MOST_NESTED && choices.includes(read.kind) && kindOf(slot, read.kind);
  return kind ? { kind: kind.kind, ...allowedFields([...kind.fields, ...kind.kept], read, kind.first, depth) } : undefined;
}

function allowedDesign(read) {
  const design = copy(DATA.start.design), [first] = design.layers, kinds = slot => DATA.slots[slot].map(kind => kind.kind);
  const part = (slot, value, instead) => value === null || value === undefined ? value : allowedPart(slot, value, kinds(slot)) ?? instead;
  Object.assign(design, allowedFields([...DATA.fields.design, CONTEXT], read, {}));
  if ([2, 4].includes(read.bytes)) design.bytes = read.bytes;
  for (const name of ["embedding", "head"]) if (isRecord(read[name])) design[name] = allowedFields(DATA.fields[name], read[name], design[name]);
  for (const [slot, name] of [["residuals", "residual"], ["norms", "norm"]]) design[name] = part(slot, read[name], design[name]) ?? design[name];
  const layers = Array.isArray(read.layers) ? read.layers.filter(isRecord).slice(0, DATA.most_layers) : [];
  if (layers.length) design.layers = layers.map(each => ({
    count: each.count === undefined ? 1 : allowed(REPEAT, each.count) ?? first.count,
    ...(each.shared === true ? { shared: true } : {}),
    mixer: part("mixers", each.mixer, first.mixer),
    feedforward: part("feedforwards", each.feedforward, first.feedforward),
  }));
  return design;
}

// The state of the page from the text behind `#`.
function stateFrom(text) {
  let read;
  try { read = JSON.parse(decodeURIComponent(text)); } catch { }  // no choice at all
  if (!isRecord(read)) return copy(DATA.start);
  const state = { ...copy(DATA.start), design: allowedDesign(isRecord(read.design) ? read.design : {}) };
  if (DATA.pages.includes(read.slot)) state.slot = read.slot;
  if (Number.isInteger(read.layer) && read.layer >= 0) state.layer = Math.min(read.layer, state.design.layers.length - 1);
  if (isRecord(read.pinned)) state.pinned = allowedDesign(read.pinned);
  return copy(state);
}

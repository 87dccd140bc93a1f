// Check an engine against a conformance kit. Needs Node alone: node reader.mjs KIT 'engine --model {model}' [DTYPE]
//
// The command, its requests and its answers are those of reader.py, and so are the lines that are printed.

import {spawn} from "node:child_process";
import fs from "node:fs";
import path from "node:path";
import process from "node:process";
import readline from "node:readline";
import {pathToFileURL} from "node:url";

const KINDS = {F64: Float64Array, F32: Float32Array, I64: BigInt64Array};

/** The tensors of a safetensors file: name -> {shape, numbers in row-major order}. */
export function tensors(file) {
    const data = fs.readFileSync(file);
    const size = Number(data.readBigUInt64LE(0));
    const {__metadata__, ...entries} = JSON.parse(data.toString("utf8", 8, 8 + size));
    const read = ({dtype, shape, data_offsets: [start, stop]}) =>
        ({shape, numbers: new KINDS[dtype](new Uint8Array(data.subarray(8 + size + start, 8 + size + stop)).buffer)});
    return Object.fromEntries(Object.entries(entries).map(([name, entry]) => [name, read(entry)]));
}

/** The requests of a case for an engine that reads one text at a time: [tokens, keep, row]. */
export function requests(test, rows) {
    const [first, then] = test.rows;
    if (test.way === "whole") return [[rows[first], 0, first]];
    if (test.way === "rollback")
        return [[rows[first].slice(0, test.read), 0, first], [rows[then].slice(test.keep), test.keep, then]];
    if (test.way !== "cut") return [];
    const ends = [0, ...test.cuts, rows[first].length];
    return ends.slice(1).map((stop, index) => [rows[first].slice(ends[index], stop), ends[index], first]);
}

/** The largest difference of the logits of tokens keep, keep + 1, … that are clear, from the golden ones. */
export function largestError(answer, {shape: [, vocabulary], numbers}, keep, clear) {
    let worst = 0;
    for (const [index, row] of answer.entries()) {
        if (keep + index >= clear) break;
        if (row.length !== vocabulary) return Infinity;
        for (const [token, logit] of row.entries()) {
            const error = Math.abs(logit - numbers[(keep + index) * vocabulary + token]);
            worst = Math.max(worst, Number.isFinite(logit) ? error : Infinity);
        }
    }
    return worst;
}

/** What a bug tells of a row of logits: those of the first tokens, and the logarithm of all exponentials' sum. */
function shown(row, tokens) {
    const largest = Math.max(...row), sum = row.reduce((before, x) => before + Math.exp(x - largest), 0);
    return [...row.slice(0, tokens), largest + Math.log(sum)];
}

/** The bug whose logits a wrong answer has; undefined if it has none's. */
function nameOf(logits, golden, document, clear, tolerance) {
    const answer = logits.map((row) => shown(row, document.shown));
    return document.bugs.find((bug, index) => bug.property === "logits" && bug.row === 0 &&
        largestError(answer, golden[`bugs.${index}.logits`], 0, clear) <= tolerance)?.name;
}

async function checked(folder, document, command, dtype) {
    const golden = tensors(path.join(folder, "goldens.safetensors"));
    const tolerance = document.tolerances[dtype], seen = new Map();
    const engine = spawn(command.replaceAll("{model}", folder), {shell: true, stdio: ["pipe", "pipe", "inherit"]});
    engine.stdin.on("error", () => {}); // it ended; the next line says so
    const lines = readline.createInterface({input: engine.stdout})[Symbol.asyncIterator]();
    for (const test of document.cases)
        for (const [tokens, keep, row] of requests(test, document.rows)) {
            engine.stdin.write(JSON.stringify({tokens, keep}) + "\n");
            const {value, done} = await lines.next();
            const answer = done ? {error: "ended"} : JSON.parse(value);
            const before = seen.get(test.property) ?? "";
            if ("error" in answer) {
                if (before === "") seen.set(test.property, `not seen: ${answer.error}`);
                continue;
            }
            const clear = document.clear[dtype][row];
            const error = largestError(answer.logits, golden[`rows.${row}.logits`], keep, clear);
            if (error > tolerance) {
                const named = row + keep === 0;
                const bug = named ? nameOf(answer.logits, golden, document, clear, tolerance) : undefined;
                if (bug != null || !before.startsWith("WRONG"))
                    seen.set(test.property, `WRONG by ${error.toPrecision(3)}${bug == null ? "" : `: ${bug}`}`);
            } else if (before === "") seen.set(test.property, "right");
        }
    engine.stdin.end();
    return seen;
}

export async function main(kit, command, dtype = "float32") {
    let failed = 0;
    for (const {family, variant} of JSON.parse(fs.readFileSync(path.join(kit, "kit.json"))).models) {
        const folder = path.join(kit, family, variant);
        const document = JSON.parse(fs.readFileSync(path.join(folder, "cases.json")));
        if (!(dtype in document.tolerances)) continue;
        for (const [what, result] of await checked(folder, document, command, dtype)) {
            console.log(`${family}/${variant}  ${what}: ${result}`);
            if (result.startsWith("WRONG")) failed = 1;
        }
    }
    return failed;
}

if (import.meta.url === pathToFileURL(process.argv[1]).href) process.exit(await main(...process.argv.slice(2)));

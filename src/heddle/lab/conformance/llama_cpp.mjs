// llama.cpp as an engine of a conformance kit: node llama_cpp.mjs FOLDER_OF_A_MODEL [FOLDER_WITH_NODE_MODULES]
//
// Needs the package node-llama-cpp, in node_modules of the second folder or of the working directory, or above. Reads
// model.gguf and answers requests as reader.py describes them. The cache is in float32: goldens are compared tightly.

import fs from "node:fs";
import path from "node:path";
import process from "node:process";
import readline from "node:readline";
import {pathToFileURL} from "node:url";

const say = (answer) => process.stdout.write(JSON.stringify(answer) + "\n");

async function binding(folder) {
    const file = path.join(folder, "node_modules/node-llama-cpp/dist/index.js");
    if (fs.existsSync(file)) return await import(pathToFileURL(file));
    if (path.dirname(folder) !== folder) return await binding(path.dirname(folder));
    throw new Error("node-llama-cpp is missing; run npm install node-llama-cpp");
}

async function opened(modelPath, folder) {
    if (!fs.existsSync(modelPath)) throw new Error("it has no GGUF");
    const {getLlama} = await binding(path.resolve(folder));
    const llama = await getLlama({gpu: false, build: "never", maxThreads: 1, logLevel: "error", progressLogs: false});
    const model = await llama.loadModel({modelPath, useMmap: false});
    const cache = {experimentalKvCacheKeyType: "F32", experimentalKvCacheValueType: "F32", flashAttention: false};
    const contextSize = Math.min(1024, model.trainContextSize + 1); // full, it would lose its first tokens
    return (await model.createContext({contextSize, sequences: 1, threads: 1, ...cache})).getSequence();
}

async function answer(sequence, {tokens, keep}) {
    if (keep < sequence.nextTokenIndex)
        await sequence.eraseContextTokenRanges([{start: keep, end: sequence.nextTokenIndex}]);
    if (keep !== sequence.nextTokenIndex) throw new Error(`only ${sequence.nextTokenIndex} of ${keep} tokens are left`);
    const asked = tokens.map((token) => [token, {generateNext: {logits: true, token: false}}]);
    const found = await sequence.controlledEvaluate(asked);
    return {logits: found.map(({next}) => Array.from({length: next.logits.size}, (_, id) => next.logits.get(id)))};
}

let sequence = null, problem = "";
try {
    sequence = await opened(path.join(process.argv[2], "model.gguf"), process.argv[3] ?? ".");
} catch (error) {
    problem = error.message;
}
for await (const line of readline.createInterface({input: process.stdin})) {
    if (sequence == null) say({error: problem});
    else say(await answer(sequence, JSON.parse(line)).catch((error) => ({error: error.message})));
}
process.exit(0);

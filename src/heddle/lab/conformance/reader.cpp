// Check an engine against a conformance kit. Needs C++17 and POSIX alone:
//
//     c++ -std=c++17 reader.cpp -o reader && ./reader KIT 'engine --model {model}' [DTYPE]
//
// The command, its requests and its answers are those of reader.py, and so are the lines that are printed.

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

using std::map, std::size_t, std::string, std::vector;

struct Json {  // a value: the members that fit are filled
    double number = NAN;
    string text;
    vector<Json> items;
    map<string, Json> fields;
    const Json& operator[](const string& name) const { return fields.at(name); }
    const Json& operator[](size_t index) const { return items.at(index); }
};

Json parse(const char*& at) {
    Json value;
    auto skip = [&] { while (*at != 0 && strchr(" \t\r\n,:", *at)) ++at; };
    skip();
    if (*at == '{') {
        for (++at, skip(); *at != '}'; skip()) {
            string name = parse(at).text;
            value.fields[name] = parse(at);
        }
        ++at;
    } else if (*at == '[') {
        for (++at, skip(); *at != ']'; skip()) value.items.push_back(parse(at));
        ++at;
    } else if (*at == '"') {
        for (++at; *at != '"'; ++at) value.text += *at == '\\' ? *++at : *at;  // escapes are of \" and of no letters
        ++at;
    } else if (strchr("-0123456789", *at)) {
        char* end;
        value.number = strtod(at, &end);
        at = end;
    } else {
        while (isalpha(*at)) ++at;  // true, false, null, NaN, Infinity
        if (*at != 0 && !strchr(",]} \t\r\n", *at)) exit((fprintf(stderr, "no JSON: %.40s\n", at), 2));
    }
    return value;
}

string contents(const string& path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) exit((fprintf(stderr, "%s: cannot be read\n", path.c_str()), 2));
    return {std::istreambuf_iterator<char>(file), {}};
}

Json json(const string& text) { const char* at = text.c_str(); return parse(at); }

struct Tensor { size_t columns; vector<double> numbers; };

map<string, Tensor> tensors(const string& path) {  // of a safetensors file, in F64 and F32; on little-endian machines
    const string data = contents(path);
    uint64_t size;
    memcpy(&size, data.data(), 8);
    map<string, Tensor> found;
    const Json header = json(data.substr(8, size));
    for (auto& [name, entry] : header.fields) {
        const string dtype = entry.fields.count("dtype") ? entry["dtype"].text : "";
        const size_t width = dtype == "F64" ? 8 : dtype == "F32" ? 4 : 0;
        if (width == 0) continue;  // metadata, and the experts that are chosen
        Tensor& tensor = found[name] = {size_t(entry["shape"].items.back().number), {}};
        const size_t start = size_t(entry["data_offsets"][0].number), stop = size_t(entry["data_offsets"][1].number);
        for (const char* at = data.data() + 8 + size + start; at < data.data() + 8 + size + stop; at += width) {
            double wide;
            float narrow;
            memcpy(width == 8 ? (void*)&wide : (void*)&narrow, at, width);
            tensor.numbers.push_back(width == 8 ? wide : narrow);
        }
    }
    return found;
}

double largest_error(const Json& logits, const Tensor& golden, size_t keep, size_t clear) {
    double worst = 0;
    for (size_t at = 0; at < logits.items.size() && keep + at < clear; ++at)
        for (size_t token = 0; token < golden.columns; ++token) {
            const double want = golden.numbers[(keep + at) * golden.columns + token];
            const double error = std::fabs(logits[at][token].number - want);
            worst = error <= worst ? worst : std::isnan(error) ? INFINITY : error;
        }
    return worst;
}

// What a bug tells of rows of logits: those of the first tokens, and the logarithm of all exponentials' sum.
Json shown(Json logits, size_t tokens) {
    for (auto& row : logits.items) {
        double largest = -INFINITY, sum = 0;
        for (auto& each : row.items) largest = std::fmax(largest, each.number);
        for (auto& each : row.items) sum += std::exp(each.number - largest);
        row.items.resize(std::min(tokens, row.items.size()) + 1);
        row.items.back().number = largest + std::log(sum);
    }
    return logits;
}

struct Request { size_t row, start, stop; };
vector<Request> requests(const Json& test, const Json& rows) {
    const string& way = test["way"].text;
    const size_t first = size_t(test["rows"][0].number), length = rows[first].items.size();
    if (way == "whole") return {{first, 0, length}};
    if (way == "rollback") {
        const size_t then = size_t(test["rows"][1].number);
        return {{first, 0, size_t(test["read"].number)}, {then, size_t(test["keep"].number), rows[then].items.size()}};
    }
    vector<Request> found;
    size_t start = 0;
    if (way == "cut") {
        for (auto& cut : test["cuts"].items) {
            found.push_back({first, start, size_t(cut.number)});
            start = size_t(cut.number);
        }
        found.push_back({first, start, length});
    }
    return found;
}

struct Engine {  // a shell command with its standard input and output
    FILE *in, *out;
    pid_t process;
    explicit Engine(const string& command) {
        int to[2], from[2];
        if (pipe(to) || pipe(from)) exit(2);
        if ((process = fork()) == 0) {
            dup2(to[0], 0), dup2(from[1], 1);
            for (int each : {to[0], to[1], from[0], from[1]}) close(each);
            execl("/bin/sh", "sh", "-c", command.c_str(), (char*)nullptr);
            _exit(127);
        }
        close(to[0]), close(from[1]);
        in = fdopen(to[1], "w"), out = fdopen(from[0], "r");
    }
    ~Engine() { fclose(in), fclose(out), waitpid(process, nullptr, 0); }
    Json ask(const Json& row, const Request& request) {
        fputs("{\"tokens\": [", in);
        for (size_t at = request.start; at < request.stop; ++at)
            fprintf(in, at == request.start ? "%d" : ", %d", int(row[at].number));
        fprintf(in, "], \"keep\": %zu}\n", request.start), fflush(in);
        string line;
        for (int byte; (byte = fgetc(out)) != EOF && byte != '\n';) line += char(byte);
        return json(line.empty() ? "{\"error\": \"ended\"}" : line);
    }
};

int main(int count, char** arguments) {
    if (count < 3) return fprintf(stderr, "reader KIT 'engine --model {model}' [DTYPE]\n"), 2;
    const string kit = arguments[1], dtype = count > 3 ? arguments[3] : "float32";
    bool failed = false;
    signal(SIGPIPE, SIG_IGN);
    const Json models = json(contents(kit + "/kit.json"));
    for (auto& entry : models["models"].items) {
        const string name = entry["family"].text + "/" + entry["variant"].text, folder = kit + "/" + name;
        const Json document = json(contents(folder + "/cases.json"));
        if (!document["tolerances"].fields.count(dtype)) continue;
        auto golden = tensors(folder + "/goldens.safetensors");
        const double tolerance = document["tolerances"][dtype].number;
        string command = arguments[2];
        for (size_t at; (at = command.find("{model}")) != string::npos;) command.replace(at, 7, folder);
        Engine engine(command);
        map<string, string> seen;
        for (auto& test : document["cases"].items)
            for (auto& request : requests(test, document["rows"])) {
                const Json answer = engine.ask(document["rows"][request.row], request);
                string& result = seen[test["property"].text];
                if (answer.fields.count("error")) {
                    if (result.empty()) result = "not seen: " + answer["error"].text;
                    continue;
                }
                const size_t clear = size_t(document["clear"][dtype][request.row].number);
                auto error_from = [&](const Json& logits, const string& name, size_t keep) {
                    return largest_error(logits, golden[name + ".logits"], keep, clear);
                };
                const double error = error_from(answer["logits"], "rows." + std::to_string(request.row), request.start);
                if (error <= tolerance) {
                    if (result.empty()) result = "right";
                    continue;
                }
                string bug;
                const auto& bugs = document["bugs"].items;
                const Json told = shown(answer["logits"], size_t(document["shown"].number));
                for (size_t at = 0; request.row + request.start == 0 && bug.empty() && at < bugs.size(); ++at)
                    if (bugs[at]["property"].text == "logits" && bugs[at]["row"].number == 0 &&
                        error_from(told, "bugs." + std::to_string(at), 0) <= tolerance)
                        bug = ": " + bugs[at]["name"].text;
                failed = true;
                char words[40];
                snprintf(words, sizeof words, "WRONG by %.3g", error);
                if (!bug.empty() || result.compare(0, 5, "WRONG")) result = words + bug;
            }
        for (auto& [what, result] : seen) printf("%s  %s: %s\n", name.c_str(), what.c_str(), result.c_str());
        fflush(stdout);
    }
    return failed;
}

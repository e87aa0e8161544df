/* hints.c: what a user may have meant: words of other programs, slips of the fingers, files, pages of the hub. */
#include "host.h"

#include <curl/curl.h>
#include <libgen.h>
#include <string.h>
#include <sys/param.h>

/* A word of ours, and those of other programs for the same. */
static const char *const meanings[] = {"play run chat generate",
                                       "download pull get fetch",
                                       "list ls models ps",
                                       "rm remove delete",
                                       "inspect show info",
                                       "serve server",
                                       "tokenize encode",
                                       "ctx c ctx-size context num-ctx max-model-len",
                                       "max-tokens n n-predict num-predict max-new-tokens",
                                       "temperature t temp"};

/* Is one word the other, but for a letter that is added, missing, wrong or swapped with the next? */
static bool is_slip(const char *a, const char *b) {
    const size_t n = strlen(a), m = strlen(b);
    size_t head = 0, tail = 0; /* letters that both have there */
    while (head < MIN(n, m) && a[head] == b[head]) head++;
    while (tail < MIN(n, m) - head && a[n - 1 - tail] == b[m - 1 - tail]) tail++;
    const size_t left = n - head - tail, right = m - head - tail;
    return MAX(left, right) < 2 || (left == 2 && right == 2 && a[head] == b[head + 1] && a[head + 1] == b[head]);
}

static bool is_near(const char *word, const char *name) {
    for (size_t i = 0; i < sizeof meanings / sizeof *meanings; i++)
        if (meanings[i][begins(meanings[i], name)] == ' ' && text_listed(meanings[i], word)) return true;
    return strlen(word) > 2 && (begins(name, word) || is_slip(word, name));
}

static const char *meant(const Command *c, const Models *here, const char *word) {
    static char text[120];
    const char *found = NULL;
    if (here && strchr(word, ' ')) return "a prompt stands behind MODEL; ";
    if (c && *c->argument && text_listed("m model", word)) return "the model needs no option; ";
    for (int i = 0; here && i < here->n; i++) {
        const char *name = here->entry[i].name, *last = strrchr(name, '/');
        if (is_near(word, name) || (last && is_near(word, last + 1))) found = name;
    }
    for (int t = 0; c && c->options[t]; t++)
        for (const Option *o = c->options[t]; o->name; o++)
            if (is_near(word, o->name)) found = o->name;
    for (int i = 0; !here && !c && commands[i]; i++)
        if (is_near(word, commands[i]->name)) found = commands[i]->name;
    snprintf(text, sizeof text, "did you mean %s%.80s? ", here ? "" : c ? "--" : "infer ", found ? found : "");
    return found ? text : "";
}

static const char *repository_of(const char *text) {
    static const char *const hosts[] = {"https://huggingface.co/", "https://hf.co/", "huggingface.co/", "hf.co/"};
    const char *endpoint = environment("HF_ENDPOINT");
    static char repository[320]; /* what it returns */
    char org[100], name[100], kind[10], revision[100];
    size_t host = endpoint ? begins(text, endpoint) : 0;
    for (size_t i = 0; i < sizeof hosts / sizeof *hosts && !host; i++) host = begins(text, hosts[i]);
    const char *path = text + host + strspn(text + host, "/");
    const int n = sscanf(path, "%99[^/?#]/%99[^/?#]/%9[^/?#]/%99[^/?#]", org, name, kind, revision);
    if (!host || n < 2) return text;
    char *plain = n == 4 ? curl_unescape(revision, 0) : NULL; /* refs%2Fpr%2F1 */
    snprintf(repository, sizeof repository, plain && text_listed("tree blob resolve", kind) ? "%s/%s@%s" : "%s/%s", org,
             name, plain);
    return curl_free(plain), repository;
}

/* Says what a file is that is no model. */
static bool refuse_file(const char *path, Error *e) {
    char head[32] = "";
    FILE *f = fopen(path, "re");
    if (!f) return fail(e, BAD_MODEL, "%s: %m", path);
    const size_t n = fread(head, 1, sizeof head, f);
    fclose(f);
    const char *kind = *head == '\x80' ? "a file of PyTorch's own format" : file_kind(head, n);
    LocalText copy = text_print("%s", path);
    if (head[8] == '{') return fail(e, BAD_MODEL, "%s is a part of a model: name its folder, %s", path, dirname(copy));
    return fail(e, BAD_MODEL, "%s is %s, no model: that is a folder with config.json and safetensors files%s", path,
                kind ? kind : "an unknown file", containers[1] ? ", or a file NAME.gguf" : "");
}

const Hints user_hints = {meant, repository_of, refuse_file};

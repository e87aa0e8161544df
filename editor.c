/* editor.c: lines from the terminal by libedit. See editor.h. */
#include "editor.h"

#include <histedit.h>
#include <langinfo.h>
#include <locale.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <termios.h>
#include <unistd.h>

struct Editor {
    EditLine *line;
    History *history;
    char *path; /* of the history; NULL: there is nowhere to keep it */
    const char *prompt;
    bool cancelled; /* Ctrl+C */
};

static char *editor_prompt(EditLine *line) {
    Editor *ed;
    el_get(line, EL_CLIENTDATA, &ed);
    return (char *)(uintptr_t)ed->prompt;
}

static unsigned char editor_cancel(EditLine *line, int key) {
    Editor *ed;
    (void)key;
    el_get(line, EL_CLIENTDATA, &ed);
    ed->cancelled = true;
    fputs("^C\n", stdout);
    return CC_NEWLINE;
}

Editor *editor_open(void) {
    HistEvent event;
    Bytes path = {0};
    const char *home = getenv("HOME");
    setlocale(LC_CTYPE, "");
    if (strcmp(nl_langinfo(CODESET), "UTF-8")) setlocale(LC_CTYPE, "C.UTF-8"); /* or what is typed is lost */
    Editor *ed = allocate_zero(1, sizeof *ed);
    ed->line = el_init("infer", stdin, stdout, stderr);
    ed->history = history_init();
    history(ed->history, &event, H_SETSIZE, 1000);
    history(ed->history, &event, H_SETUNIQUE, 1);
    el_set(ed->line, EL_CLIENTDATA, ed);
    el_set(ed->line, EL_PROMPT, editor_prompt);
    el_set(ed->line, EL_EDITOR, "emacs");
    el_set(ed->line, EL_HIST, history, ed->history);
    el_set(ed->line, EL_SIGNAL, 1);                  /* it redraws after a change of the window */
    el_set(ed->line, EL_SETTY, "-d", "-isig", NULL); /* Ctrl+C is a key while a line is edited */
    el_set(ed->line, EL_ADDFN, "cancel", "clear the line", editor_cancel);
    el_set(ed->line, EL_BIND, "^C", "cancel", NULL);
    el_set(ed->line, EL_BIND, "^R", "em-inc-search-prev", NULL);
    if (!home) return ed;
    bytes_print(&path, "%s/.cache", home);
    mkdir(path.data, 0700);
    bytes_text(&path, "/infer");
    mkdir(path.data, 0700);
    bytes_text(&path, "/history");
    ed->path = path.data;
    history(ed->history, &event, H_LOAD, ed->path);
    return ed;
}

void editor_close(Editor *ed) {
    HistEvent event;
    if (ed->path) history(ed->history, &event, H_SAVE, ed->path);
    if (ed->path) chmod(ed->path, 0600);
    history_end(ed->history);
    el_end(ed->line);
    free(ed->path);
    free(ed);
}

bool editor_line(Editor *ed, const char *prompt, Bytes *out) {
    int n;
    sigset_t interrupt;
    ed->prompt = prompt;
    ed->cancelled = false;
    sigemptyset(&interrupt);
    sigaddset(&interrupt, SIGINT);
    /* Until the terminal is raw Ctrl+C is a signal, which libedit would pass on. */
    sigprocmask(SIG_BLOCK, &interrupt, NULL);
    const char *line = el_gets(ed->line, &n);
    sigprocmask(SIG_UNBLOCK, &interrupt, NULL);
    bool end = !ed->cancelled && n <= 0;
    if (end)
        fputs("\n", stdout);
    else
        bytes_add(out, line, ed->cancelled ? 0 : (size_t)n - (line[n - 1] == '\n'));
    return !end;
}

bool editor_text(Editor *ed, Bytes *out) {
    static const char quotes[] = "\"\"\"";
    HistEvent event;
    if (!editor_line(ed, "You: ", out)) return false;
    if (strspn(out->data, " \t") < out->n) history(ed->history, &event, H_ENTER, out->data);
    if (strncmp(out->data, quotes, 3)) return true;
    memmove(out->data, out->data + 3, out->n - 2);
    out->n -= 3;
    while (out->n < 3 || strcmp(out->data + out->n - 3, quotes)) {
        if (out->n) bytes_text(out, "\n");
        if (!editor_line(ed, "...  ", out) || ed->cancelled) {
            out->n = 0;
            bytes_text(out, "");
            return true;
        }
    }
    out->n -= 3;
    if (out->n && out->data[out->n - 1] == '\n') out->n--; /* the quotes stand on a line of their own */
    out->data[out->n] = 0;
    return true;
}

void editor_echo(bool on) {
    struct termios mode;
    if (tcgetattr(STDIN_FILENO, &mode)) return;
    mode.c_lflag = on ? mode.c_lflag | ECHO : mode.c_lflag & ~(tcflag_t)ECHO;
    tcsetattr(STDIN_FILENO, TCSANOW, &mode);
}

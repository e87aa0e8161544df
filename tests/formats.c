/* formats.c: what unit.c checks of formats/: answers in other formats than harmony. unit.c includes it. */

/* The same in other formats. */
static void other_formats_are_rendered_and_read_again(void) {
    static const char *const pieces[] = {"\1",
                                         "\2",
                                         "\3",
                                         "\4",
                                         "\5",
                                         "\6",
                                         "<think>",
                                         "</think>",
                                         "</thi",
                                         "nk>",
                                         "<tool_call>",
                                         "</tool_call>",
                                         "HELLO",
                                         "<",
                                         " WORLD\n",
                                         " ",
                                         "\n\n",
                                         "{\"name\": \"f\"",
                                         ", \"arguments\": {\"a\":[1, {}]}",
                                         "}",
                                         "\13",
                                         "\360\237",
                                         "\343\200\200",
                                         "{\"name\":\"g\",\"parameters\":{}}",
                                         "<tool_call>{\"name\":\"f\"}</tool_call>"};
    enum { PIECES = sizeof pieces / sizeof *pieces };
    uint64_t state = 12;
    for (int i = 0; i < OTHERS * 2000; i++) {
        static Talker talker;
        Bytes text = {0};
        if (i % 2000 == 0) check(talker_open_other(&talker, i / 2000), "format %d is not known", i / 2000);
        bytes_text(&text, "");
        for (int k = 0; k < 1 + i % 20; k++) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            const char *piece = pieces[(state >> 33) % PIECES];
            if (*piece > 2 || state >> 60 == 0) bytes_text(&text, piece); /* the end is rare */
        }
        check_answer(i, &text, other_problem(&talker, text.data, text.n));
        if (i % 2000 == 1999) talker_close(&talker);
    }
}

/* Every format that has tools: what forces a call is the beginning of one, of a function or of any. */
static void calls_are_forced(void) {
    static const char *const bodies[] = {"{\"a\":1}", "{\"a\":1}}\n</tool_call>", "{\"a\":1}}\n</tool_call>",
                                         "{\"a\":1}}", "{\"a\":1}}]"};
    static const char *const whole[] = {"f\3json\4{\"a\":1}", "f\", \"arguments\": {\"a\":1}}\n</tool_call>",
                                        "f\", \"arguments\": {\"a\":1}}\n</tool_call>",
                                        "f\", \"parameters\": {\"a\":1}}", "f\", \"arguments\": {\"a\":1}}]"};
    for (int i = 0; i < 10; i++) {
        Talker m;
        Error e;
        Ids ids = {0};
        Bytes shown = {0};
        Reader r;
        int which = i / 2, format = which < 4 ? which : OTHERS; /* Mistral is the last */
        check(format ? talker_open_other(&m, format - 1) : talker_open(&m), "format %d is not known", format);
        if (format == 2) { /* its tokenizer lacks the marks */
            check(!chat_force(&m.chat, "medium", "f", &ids, &e) && e.code == USAGE, "a call without marks");
            talker_close(&m);
            continue;
        }
        must(chat_force(&m.chat, "medium", i % 2 ? NULL : "f", &ids, &e), &e);
        reader_init(&r, &m.chat, NULL);
        for (size_t k = 0; k < ids.n; k++) reader_push(&r, ids.data[k], &shown);
        const char *s = (i % 2 ? whole : bodies)[which];
        while (*s && *s != '<') reader_push(&r, m.token_of[(unsigned char)*s++], &shown);
        if (*s) reader_push(&r, tokenizer_added(m.tokenizer, "</tool_call>"), &shown); /* a mark is one token */
        reader_push(&r, m.token_of[format ? 1 : 6], &shown);
        check(r.messages == 1 && message_part(r.message) == CALL && !strcmp(r.message->recipient, "functions.f") &&
                  strstr(r.message->content.data, "1}"),
              "format %d: %s", format, r.messages ? r.message->content.data : "no message");
        reader_free(&r);
        ids_free(&ids), bytes_free(&shown);
        talker_close(&m);
    }
}

static void formats_tests(void) {
    run("unit: answers in other formats are rendered and read again", other_formats_are_rendered_and_read_again);
    run("unit: calls can be forced in every format that has tools", calls_are_forced);
}

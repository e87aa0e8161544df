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
static void calls_of_formats_are_forced(void) {
    static const char *const bodies[] = {"{\"a\":1}}\n</tool_call>", "", "{\"a\":1}}", "{\"a\":1}}]"};
    static const char *const whole[] = {"f\", \"arguments\": {\"a\":1}}\n</tool_call>", "",
                                        "f\", \"parameters\": {\"a\":1}}", "f\", \"arguments\": {\"a\":1}}]"};
    static const int formats_of[] = {0, 1, 2, OTHERS - 1}; /* Mistral is the last */
    for (int i = 0; i < 8; i++) {
        Talker m;
        Error e;
        Ids ids = {0};
        check(talker_open_other(&m, formats_of[i / 2]), "format %d is not known", i / 2);
        if (*bodies[i / 2]) {
            call_is_forced(&m, i % 2 ? NULL : "f", (i % 2 ? whole : bodies)[i / 2], 1);
        } else { /* its tokenizer lacks the marks */
            check(!chat_force(&m.chat, "medium", "f", &ids, &e) && e.code == USAGE, "a call without marks");
        }
        talker_close(&m);
    }
}

static void formats_tests(void) {
    run("unit: answers in other formats are rendered and read again", other_formats_are_rendered_and_read_again);
    run("unit: calls can be forced in every other format that has tools", calls_of_formats_are_forced);
}

/* terminal.c: what unit.c checks of terminal/: saved conversations. unit.c includes it. */

/* A conversation is saved in the shape in which it came, without a word that only harmony has. */
static void conversations_are_chat_completions(void) {
    static const char text[] = "{\"model\":\"m\",\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\"}}],"
                               "\"reasoning_effort\":\"low\",\"date\":\"none\",\"messages\":["
                               "{\"role\":\"system\",\"content\":\"Be brief.\"},{\"role\":\"user\",\"content\":\"Hi\"},"
                               "{\"role\":\"assistant\",\"reasoning_content\":\"I call.\"},"
                               "{\"role\":\"assistant\",\"tool_calls\":[{\"id\":\"a\",\"type\":\"function\","
                               "\"function\":{\"name\":\"f\",\"arguments\":\"{}\"}}]},"
                               "{\"role\":\"tool\",\"tool_call_id\":\"a\",\"content\":\"7\"},{\"role\":\"assistant\","
                               "\"content\":\"Seven.\"}]}";
    Error e;
    Conversation c;
    Bytes saved = {0};
    cJSON *json = json_parse(text, strlen(text), "test", &e);
    conversation_init(&c);
    check(json && conversation_parse(&c, json, &e), "not loaded: %s", e.text);
    json_append(&saved, conversation_json(&c));
    cJSON *again = json_parse(saved.data, saved.n, "saved", &e);
    check(again && cJSON_Compare(json, again, true), "saved as %s", saved.data);
    cJSON_Delete(json);
    cJSON_Delete(again);
    conversation_free(&c);
    bytes_free(&saved);
}

static void terminal_tests(void) {
    run("unit: a conversation is saved as chat completions", conversations_are_chat_completions);
}

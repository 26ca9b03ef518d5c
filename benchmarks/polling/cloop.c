/* The floor: rounds of polls over N sockets from one epoll loop in C, for benchmarks/poll.py.
 *
 *   cloop N SECONDS ROUNDS_AT_LEAST REQUEST_FILE LISTENER_FD
 *
 * Accepts N connections on the inherited listener, then per round: send the request (its poll number as it
 * is) to all, receive until each has sent a whole REPLY, copy the frames into a sink. Prints one JSON object
 * with the CPU time of the measured rounds and the round times.
 */
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { KIND_REPLY = 5, BUFFER = 128 << 10, EVENTS = 1024, HELD = 64 << 10 };

struct conn {
    int fd;
    uint32_t held;
    unsigned char *partial;
};

static unsigned char buffer[BUFFER + HELD], *sink;
static size_t sink_used, sink_size = 64u << 20;

static double now_s(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (double)at.tv_sec + (double)at.tv_nsec / 1e9;
}

static double cpu_s(void) {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
           (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1e6;
}

/* Reads once; returns the number of REPLY frames completed. */
static int readable(struct conn *conn) {
    if (conn->held) memcpy(buffer, conn->partial, conn->held);
    ssize_t got = recv(conn->fd, buffer + conn->held, BUFFER, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
    if (got <= 0) exit(3);
    uint32_t end = conn->held + (uint32_t)got, at = 0;
    int replies = 0;
    while (end - at >= 8) {
        uint32_t length;
        memcpy(&length, buffer + at, 4);
        length += 4;
        if (end - at < length) break;
        if (buffer[at + 6] == KIND_REPLY) replies++;
        else {
            if (sink_used + length > sink_size) sink_used = 0;
            memcpy(sink + sink_used, buffer + at, length);
            sink_used += length;
        }
        at += length;
    }
    conn->held = end - at;
    if (conn->held > HELD) exit(4);
    if (conn->held) {
        if (!conn->partial) conn->partial = malloc(HELD);
        memcpy(conn->partial, buffer + at, conn->held);
    }
    return replies;
}

int main(int argc, char **argv) {
    if (argc != 6) return 64;
    int n = atoi(argv[1]), least = atoi(argv[3]), listener = atoi(argv[5]), one = 1;
    double seconds = atof(argv[2]);
    unsigned char request[4096];
    FILE *file = fopen(argv[4], "rb");
    size_t request_size = file ? fread(request, 1, sizeof request, file) : 0;
    sink = malloc(sink_size);
    memset(sink, 0, sink_size);
    struct conn *conns = calloc((size_t)n, sizeof *conns);
    int epoll = epoll_create1(0);
    for (int i = 0; i < n; i++) {
        conns[i].fd = accept(listener, NULL, NULL);
        setsockopt(conns[i].fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = &conns[i]};
        epoll_ctl(epoll, EPOLL_CTL_ADD, conns[i].fd, &event);
    }
    struct epoll_event events[EVENTS];
    double *times = malloc(sizeof *times * 1000000), started = 0, used = 0;
    int rounds = 0, warmup = 2;
    while (warmup || rounds < least || (now_s() - started < seconds && rounds < 1000000)) {
        if (warmup && !--warmup) started = now_s(), used = cpu_s(), rounds = 0;
        double begun = now_s();
        int missing = n;
        for (int i = 0; i < n; i++)
            if (send(conns[i].fd, request, request_size, MSG_NOSIGNAL) != (ssize_t)request_size) return 5;
        while (missing > 0) {
            int count = epoll_wait(epoll, events, EVENTS, -1);
            for (int i = 0; i < count; i++) missing -= readable(events[i].data.ptr);
        }
        times[rounds++] = now_s() - begun;
    }
    used = cpu_s() - used;
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    printf("{\"cpu_s\": %.6f, \"wall_s\": %.6f, \"switches\": %ld, \"rss_kb\": %ld, \"round_s\": [", used,
           now_s() - started, usage.ru_nvcsw + usage.ru_nivcsw, usage.ru_maxrss);
    for (int i = 0; i < rounds; i++) printf(i ? ", %.6f" : "%.6f", times[i]);
    puts("]}");
    return 0;
}

/* Simulated gateways for benchmarks/poll.py: one process, one epoll loop, N connections, no think time.
 *
 *   swarm poll PORT N SPEC STALLED   dial N connections, register, answer each POLL with a CUT and a REPLY
 *   swarm http PORT BODY             answer each HTTP request with the file BODY (a Prometheus exporter)
 *
 * SPEC is written by payload.py: u32 hello_len, hello_gw, register_len, cut_len, cut_gw, cut_seq, reply_len,
 * reply_poll, reply_sent; then N hello blocks of hello_len, then the CUT and the REPLY template. The offsets
 * name bytes to patch: 16 raw bytes of gateway id, big-endian u64 numbers (msgpack's uint 64).
 * The last STALLED connections register, then read nothing any more. Prints "ready" when all are connected.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

enum { KIND_POLL = 18, IN_BYTES = 4096, EVENTS = 512 };

struct conn {
    int fd;
    int used;
    uint64_t seq;
    unsigned char gw[16];
    unsigned char in[IN_BYTES];
};

static void die(const char *what) {
    perror(what);
    exit(1);
}

static void raise_files(void) {
    struct rlimit limit;
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
}

static void write_all(int fd, const unsigned char *data, size_t size) {
    while (size) {
        ssize_t sent = send(fd, data, size, MSG_NOSIGNAL);
        if (sent < 0) {
            if (errno == EINTR) continue;
            exit(errno == EPIPE || errno == ECONNRESET ? 0 : 1);
        }
        data += sent;
        size -= (size_t)sent;
    }
}

static void put_u64(unsigned char *at, uint64_t value) {
    for (int i = 7; i >= 0; i--, value >>= 8) at[i] = (unsigned char)value;
}

/* One non-negative msgpack integer; returns the bytes it took. */
static int get_uint(const unsigned char *at, uint64_t *value) {
    int bytes = at[0] == 0xcc ? 1 : at[0] == 0xcd ? 2 : at[0] == 0xce ? 4 : at[0] == 0xcf ? 8 : 0;
    if (!bytes) {
        *value = at[0] & 0x7f;
        return 1;
    }
    *value = 0;
    for (int i = 1; i <= bytes; i++) *value = *value << 8 | at[i];
    return bytes + 1;
}

static uint32_t *spec;
static unsigned char *answer; /* CUT and REPLY, one behind the other */

/* A POLL's header is {"poll": n, "sent_ns": n, ...} in this order. */
static void answer_poll(struct conn *conn, const unsigned char *frame) {
    uint64_t poll, sent;
    const unsigned char *at = frame + 8 + 1 + 5;
    at += get_uint(at, &poll);
    get_uint(at + 8, &sent);
    memcpy(answer + spec[4], conn->gw, 16);
    put_u64(answer + spec[5], ++conn->seq);
    put_u64(answer + spec[3] + spec[7], poll);
    put_u64(answer + spec[3] + spec[8], sent);
    write_all(conn->fd, answer, spec[3] + spec[6]);
}

static void readable(struct conn *conn) {
    ssize_t got = recv(conn->fd, conn->in + conn->used, IN_BYTES - (size_t)conn->used, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got <= 0) exit(0);
    conn->used += (int)got;
    int at = 0;
    while (conn->used - at >= 8) {
        uint32_t length;
        memcpy(&length, conn->in + at, 4);
        length += 4;
        if (length > IN_BYTES) exit(2);
        if ((uint32_t)(conn->used - at) < length) break;
        if (conn->in[at + 6] == KIND_POLL) answer_poll(conn, conn->in + at);
        at += (int)length;
    }
    memmove(conn->in, conn->in + at, (size_t)(conn->used - at));
    conn->used -= at;
}

static unsigned char *load(const char *path, long *size) {
    FILE *file = fopen(path, "rb");
    if (!file) die(path);
    fseek(file, 0, SEEK_END);
    *size = ftell(file);
    rewind(file);
    unsigned char *data = malloc((size_t)*size + 1);
    if (!data || fread(data, 1, (size_t)*size, file) != (size_t)*size) die(path);
    fclose(file);
    return data;
}

static void poll_swarm(int port, int n, const char *path, int stalled) {
    long size;
    spec = (uint32_t *)load(path, &size);
    unsigned char *hellos = (unsigned char *)(spec + 9);
    answer = hellos + (size_t)n * spec[0];
    int epoll = epoll_create1(0);
    struct conn *conns = calloc((size_t)n, sizeof *conns);
    for (int i = 0; i < n; i++) {
        struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
        address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        conns[i].fd = socket(AF_INET, SOCK_STREAM, 0);
        setsockopt(conns[i].fd, IPPROTO_TCP, TCP_CONGESTION, "reno", 4); /* see child.py */
        if (connect(conns[i].fd, (struct sockaddr *)&address, sizeof address)) die("connect");
        int one = 1;
        setsockopt(conns[i].fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        memcpy(conns[i].gw, hellos + (size_t)i * spec[0] + spec[1], 16);
        write_all(conns[i].fd, hellos + (size_t)i * spec[0] + 16, spec[2]);
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = &conns[i]};
        if (i < n - stalled) epoll_ctl(epoll, EPOLL_CTL_ADD, conns[i].fd, &event);
    }
    puts("ready");
    fflush(stdout);
    struct epoll_event events[EVENTS];
    for (;;) {
        int count = epoll_wait(epoll, events, EVENTS, -1);
        for (int i = 0; i < count; i++) readable(events[i].data.ptr);
    }
}

static void http_swarm(int port, const char *path) {
    long size;
    unsigned char *body = load(path, &size);
    char head[200];
    int head_size = snprintf(head, sizeof head,
                             "HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\n"
                             "Content-Length: %ld\r\n\r\n", size);
    unsigned char *page = malloc((size_t)head_size + (size_t)size);
    memcpy(page, head, (size_t)head_size);
    memcpy(page + head_size, body, (size_t)size);
    int listener = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    address.sin_addr.s_addr = htonl(INADDR_ANY); /* all of 127/8: one address a target */
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 1024)) die("listen");
    int epoll = epoll_create1(0);
    struct epoll_event event = {.events = EPOLLIN, .data.fd = listener}, events[EVENTS];
    epoll_ctl(epoll, EPOLL_CTL_ADD, listener, &event);
    puts("ready");
    fflush(stdout);
    for (;;) {
        int count = epoll_wait(epoll, events, EVENTS, -1);
        for (int i = 0; i < count; i++) {
            int fd = events[i].data.fd;
            if (fd == listener) {
                event.data.fd = accept(listener, NULL, NULL);
                epoll_ctl(epoll, EPOLL_CTL_ADD, event.data.fd, &event);
                continue;
            }
            char request[IN_BYTES];
            ssize_t got = recv(fd, request, sizeof request, 0);
            if (got <= 0) close(fd);
            else if (got >= 4 && !memcmp(request + got - 4, "\r\n\r\n", 4))
                write_all(fd, page, (size_t)head_size + (size_t)size);
        }
    }
}

int main(int argc, char **argv) {
    raise_files();
    if (argc == 6 && !strcmp(argv[1], "poll")) poll_swarm(atoi(argv[2]), atoi(argv[3]), argv[4], atoi(argv[5]));
    else if (argc == 4 && !strcmp(argv[1], "http")) http_swarm(atoi(argv[2]), argv[3]);
    fprintf(stderr, "usage: swarm poll PORT N SPEC STALLED | swarm http PORT BODY\n");
    return 64;
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "worker.h"

#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>

struct workers {
	struct loop *loop;
	struct watch watch; /* the eventfd */
	unsigned running;   /* loop's thread only */
	pthread_mutex_t lock;
	pthread_cond_t finished;
	struct job *done; /* under lock */
};

static void report(struct workers *w)
{
	struct job *j, *next;

	pthread_mutex_lock(&w->lock);
	j = w->done;
	w->done = NULL;
	pthread_mutex_unlock(&w->lock);
	for (; j; j = next) {
		next = j->next;
		w->running--;
		j->done(j);
	}
}

static void ready(struct watch *watch, uint32_t events)
{
	uint64_t n;

	if (read(watch->fd, &n, sizeof(n)) == sizeof(n))
		report(watch->arg);
}

struct workers *workers_new(struct loop *l)
{
	struct workers *w = calloc(1, sizeof(*w));
	int fd;

	if (!w)
		return NULL;
	fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	w->loop = l;
	w->watch = (struct watch){ .fd = fd, .ready = ready, .arg = w };
	if (fd < 0 || loop_add(l, &w->watch, EPOLLIN) < 0) {
		if (fd >= 0)
			close(fd);
		free(w);
		return NULL;
	}
	pthread_mutex_init(&w->lock, NULL);
	pthread_cond_init(&w->finished, NULL);
	return w;
}

static void *thread(void *arg)
{
	struct job *j = arg;
	struct workers *w = j->workers;
	uint64_t one = 1;

	j->work(j);
	pthread_mutex_lock(&w->lock);
	j->next = w->done;
	w->done = j;
	/* Written under the lock: after it is let go of, the workers may be gone. */
	if (write(w->watch.fd, &one, sizeof(one)) < 0)
		(void)0; /* the counter cannot overflow with 1 a job */
	pthread_cond_signal(&w->finished);
	pthread_mutex_unlock(&w->lock);
	return NULL;
}

int job_start(struct workers *w, struct job *j, struct err *e)
{
	pthread_attr_t attr;
	sigset_t all, old;
	pthread_t t;
	int r;

	j->workers = w;
	pthread_attr_init(&attr);
	pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
	/* Signals are for the loop's thread. */
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	r = pthread_create(&t, &attr, thread, j);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	pthread_attr_destroy(&attr);
	if (r)
		return err_set(e, r, "cannot start a thread: %s", strerror(r));
	w->running++;
	return 0;
}

void workers_free(struct workers *w)
{
	if (!w)
		return;
	while (w->running) {
		pthread_mutex_lock(&w->lock);
		while (!w->done)
			pthread_cond_wait(&w->finished, &w->lock);
		pthread_mutex_unlock(&w->lock);
		report(w);
	}
	loop_remove(w->loop, &w->watch);
	close(w->watch.fd);
	pthread_cond_destroy(&w->finished);
	pthread_mutex_destroy(&w->lock);
	free(w);
}
